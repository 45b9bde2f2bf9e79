"""Ranks that do not step alike: all of them raise, at once, and say why."""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from tests.torch.helpers import INF, poison
from tests.torch.ranks.gpt import EXACT, GPT, batch_of
from tests.torch.ranks.launch import Ranks, run_ranks
from tests.torch.ranks.layouts import LAYOUTS, case
from tests.torch.ranks.soak import Run
from tests.torch.ranks.whole import digest_of, whole_state

from gradscale import Dynamic, Headroom, NoScaling
from gradscale.torch import LossScaler, RankFailed
from gradscale.torch.ranks import store

pytestmark = pytest.mark.cpu_only("gloo, which has no other device")

PERIOD = 64
"""Calls of `step` under DDP between two that compare the scales."""


class Raised(NamedTuple):
    """What a rank raised in a step, if it did, and what came of it.

    Attributes:
        kind: the name of the type; empty if nothing was raised.
        text: the message.
        steps: how many steps it took.
        untouched: whether weights and optimizer state are as before that step.
        afterwards: status of another step, for which all ranks have loaded the same state.
    """

    kind: str
    text: str
    steps: int
    untouched: bool
    afterwards: str


def _raises(*_: Any, **__: Any) -> None:
    raise RuntimeError("out of memory")


def _interrupts(*_: Any) -> None:
    raise KeyboardInterrupt


HOOKS = {"break": _raises, "interrupt": _interrupts}
"""What is called before an optimizer steps, by the event that it is for."""


class Loop:
    """A training loop on this rank."""

    def __init__(self, layout: str | None) -> None:
        self.model: Any = GPT(EXACT) if layout is None else LAYOUTS[layout].spread(GPT(EXACT))
        run = Run("LossScaler", 0, {})
        self.optimizer, self.scaler = run.optimizer(self.model), LossScaler(self.model, run.policy)
        self.rank = dist.get_rank()
        self.start = self.scaler.state_dict()

    def backward(self, factor: float = 1.0) -> None:
        inputs, targets = batch_of(0)
        self.scaler.backward(EXACT.loss(self.model(inputs), targets) * factor)

    def step(self, **arguments: Any) -> str:
        return str(self.scaler.step(self.optimizer, **arguments).status())

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.step()
            self.optimizer.zero_grad()

    def statuses(self, events: Sequence[str]) -> list[str]:
        """Returns the status or the error of one step for each of the `events`, which name ranks by their number."""
        found: list[str] = []
        for event in events:
            here = event.endswith((str(self.rank), "all"))
            if event.startswith("load") and here:
                self.scaler.load_state_dict(self.start)
            if not event.startswith("repeat"):
                self.optimizer.zero_grad()
                self.backward(float("nan") if event.startswith("bad loss") and self.rank == 0 else 1.0)
            elif not here:
                continue
            hook = HOOKS.get(event.split()[0]) if here else None
            breaks = None if hook is None else self.optimizer.register_step_pre_hook(hook)
            try:
                found.append(self.step(clip_norm=-1.0 if "refuse" in event and here else 1.0))
            except (ValueError, RuntimeError, KeyboardInterrupt) as error:
                found.append(type(error).__name__ + ", applied" * getattr(error, "applied", False))
            if breaks is not None:
                breaks.remove()
        return found

    def digest(self) -> str:
        return digest_of(whole_state(self.model, self.optimizer), {})

    def raised(self, step: Callable[[], Any], within: int = 1) -> Raised:
        """Returns what is raised by one of `within` calls of `step`."""
        kind, text, calls, before = "", "", 0, ""
        while not kind and calls < within:
            calls += 1
            before = self.digest() if within == 1 else before
            try:
                step()
            except Exception as error:
                kind, text = type(error).__name__, str(error)
            if not kind:
                self.optimizer.zero_grad()
        untouched = self.digest() == before
        self.optimizer.zero_grad()
        self.scaler.load_state_dict(self.start)
        self.backward()
        return Raised(kind, text, calls, untouched, self.step())


def loads_alone(loop: Loop, after: int = 0, within: int = 1) -> Raised:
    """Rank 0 loads another scale than rank 1 has."""
    loop.train(after)
    if loop.rank == 0:
        loop.scaler.load_state_dict(LossScaler(policy=Dynamic(init_scale=1024.0)).state_dict())

    def step() -> None:
        loop.backward()
        loop.step()

    return loop.raised(step, within)


def is_refused(loop: Loop) -> Raised:
    """Rank 1 has not cleared its gradients."""
    loop.backward()
    loop.step()
    if loop.rank == 0:
        loop.optimizer.zero_grad()
    loop.backward()
    return loop.raised(loop.step)


def has_a_bad_argument(loop: Loop) -> Raised:
    """Rank 1 passes an argument that is refused."""
    loop.backward()
    return loop.raised(lambda: loop.step(clip_norm=1.0 if loop.rank == 0 else -1.0))


def has_other_arguments(loop: Loop) -> Raised:
    """Rank 1 clips, and rank 0 does not."""
    loop.backward()
    return loop.raised(lambda: loop.step(clip_norm=None if loop.rank == 0 else 1.0))


def in_every_way(layout: str | None) -> dict[str, Raised]:
    ways: dict[str, Callable[[Loop], Raised]] = {
        "loads alone": loads_alone,
        "loads alone later": lambda loop: loads_alone(loop, after=3),
        "is refused": is_refused,
        "has a bad argument": has_a_bad_argument,
        "has other arguments": has_other_arguments,
    }
    return {name: way(Loop(layout)) for name, way in ways.items()}


@pytest.fixture(scope="module", params=[case("FSDP2 on 2"), pytest.param(None, id="plain tensors")])
def parted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Raised]]:
    """What each of two ranks raises in every way to part, in a step that has a round."""
    return run_ranks(2, in_every_way, request.param, folder=tmp_path_factory.mktemp("parted"))


@pytest.mark.parametrize("way", ["loads alone", "loads alone later"])
def test_scales_that_differ_are_named_on_every_rank_at_the_next_step(parted: Any, way: str) -> None:
    for found in (ranks[way] for ranks in parted):
        assert found.kind == "ScaleDesync"
        assert "1024 on rank 0" in found.text
        assert "65536 on rank 1" in found.text
        assert found.untouched
        assert found.afterwards == "applied"


@pytest.mark.parametrize(
    ("way", "kind", "reason"),
    [
        ("is refused", "RuntimeError", "Gradients from before"),
        ("has a bad argument", "ValueError", "`clip_norm` must be"),
    ],
)
def test_a_rank_that_is_refused_raises_its_error_and_the_others_name_it(
    parted: Any, way: str, kind: str, reason: str
) -> None:
    other, refused = (ranks[way] for ranks in parted)
    assert (refused.kind, other.kind) == (kind, "RankFailed")
    assert reason in refused.text
    assert f"Rank 1: {kind}: {refused.text}" in other.text
    assert other.untouched
    assert refused.untouched
    assert (other.afterwards, refused.afterwards) == ("applied", "applied")


def test_ranks_with_other_arguments_all_raise(parted: Any) -> None:
    for found in (ranks["has other arguments"] for ranks in parted):
        assert found.kind == "RuntimeError"
        assert "same arguments" in found.text
        assert found.untouched
        assert found.afterwards == "applied"


def bad_argument_in(layout: str) -> Raised:
    return has_a_bad_argument(Loop(layout))


def test_a_rank_that_is_refused_sums_its_part_of_the_gradients_first(tmp_path: Path) -> None:
    # Ranks of sequence parallel hold summands of gradients, and the others sum them before they come to the round.
    other, refused = run_ranks(2, bad_argument_in, "SP on 2", folder=tmp_path)
    assert (refused.kind, other.kind) == ("ValueError", "RankFailed")
    assert f"Rank 1: ValueError: {refused.text}" in other.text
    assert (other.afterwards, refused.afterwards) == ("applied", "applied")


def cannot_measure() -> list[str]:
    """Rank 1 fails where it puts together what it sends, then in a warning after the round, which is an error here."""
    loop = Loop(None)
    norms, stages, found = loop.scaler._rounds.norms, loop.scaler._stages, []
    for owner, name in ((norms, "squares"), (stages, "_warn_of_half")):
        if loop.rank == 1:
            setattr(owner, name, _raises)
        found += loop.statuses(["clean"])
        if loop.rank == 1:
            delattr(owner, name)
    return found + loop.statuses(["clean"])


def test_a_rank_that_fails_around_the_round_is_named_on_the_others(tmp_path: Path) -> None:
    other, failed = run_ranks(2, cannot_measure, folder=tmp_path)
    assert other == [FAILED, OK, MISSED]
    assert failed == ["RuntimeError", "RuntimeError", MISSED]


def without_scaling() -> list[str]:
    """Returns what three loops get in which rank 1 differs, and the first of which has no scale on any rank."""
    found: list[str] = []
    policies = (NoScaling(), NoScaling()), (Dynamic(), NoScaling()), (NoScaling(), Headroom())
    for ranks in policies:
        for clips in ((1.0, -1.0), (1.0, 1.0), (None, None)):
            loop = Loop(None)
            loop.scaler = LossScaler(loop.model, ranks[loop.rank])
            loop.backward()
            try:
                found.append(loop.step(clip_norm=clips[loop.rank]))
            except (ValueError, RuntimeError) as error:
                found.append(type(error).__name__)
    return found


def test_ranks_without_a_scale_do_not_wait_for_one_that_is_refused_or_has_a_scale(tmp_path: Path) -> None:
    other, differs = run_ranks(2, without_scaling, folder=tmp_path)
    same = [FAILED, OK, OK]
    desync = [FAILED, "ScaleDesync", "ScaleDesync"]
    assert other == [*same, *desync, *desync]
    assert differs == [REFUSED, *same[1:], *[REFUSED, *desync[1:]] * 2]


def loads_no_scaling() -> list[str]:
    """Rank 1 loads a policy without a scale, and after the error so does rank 0."""
    loop, found = Loop(None), []
    loop.train(2)
    for rank in (1, 0):
        if loop.rank == rank:
            loop.scaler.load_state_dict(LossScaler(policy=NoScaling()).state_dict())
        loop.optimizer.zero_grad()
        loop.backward()
        try:
            found.append(loop.step())
        except RuntimeError as error:
            found.append(type(error).__name__)
    return found


def test_a_rank_that_loads_a_policy_without_a_scale_is_found_at_the_next_step(tmp_path: Path) -> None:
    first, second = run_ranks(2, loads_no_scaling, folder=tmp_path)
    assert first == second == ["ScaleDesync", "applied"]


def retries_alone(clip_norm: float | None) -> Raised:
    """Rank 1 asks for retries, and rank 0 does not."""
    loop = Loop(None)
    loop.train(1)
    inputs, targets = batch_of(0)
    loss = EXACT.loss(loop.model(inputs), targets)

    def step() -> None:
        loop.scaler.backward(loss, retries=2 * loop.rank)
        loop.step(clip_norm=clip_norm)

    return loop.raised(step)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_rank_that_retries_alone_and_those_that_do_not_all_raise(clip_norm: float | None, tmp_path: Path) -> None:
    for found in run_ranks(2, retries_alone, clip_norm, folder=tmp_path):
        assert found.kind == "RuntimeError"
        assert "`backward` with `retries`, `grad` or `probe` on 1 of 2 ranks" in found.text
        assert found.untouched
        assert found.afterwards == "applied"


def has_no_batch() -> Raised:
    """Rank 1 steps without a backward pass."""
    loop = Loop(None)
    loop.train(1)
    if loop.rank == 0:
        loop.backward()
    return loop.raised(loop.step)


def test_a_rank_without_a_batch_is_named_on_the_others(tmp_path: Path) -> None:
    other, without = run_ranks(2, has_no_batch, folder=tmp_path)
    assert (without.kind, other.kind) == ("RuntimeError", "RankFailed")
    assert f"Rank 1: RuntimeError: {without.text}" in other.text
    assert (other.afterwards, without.afterwards) == ("applied", "applied")


def under_ddp() -> dict[str, Raised]:
    ways: dict[str, Callable[[Loop], Raised]] = {
        "loads alone": loads_alone,
        "loads alone later": lambda loop: loads_alone(loop, after=3, within=PERIOD),
        "is refused": is_refused_and_goes_on,
    }
    return {name: way(Loop("DDP on 2")) for name, way in ways.items()}


def is_refused_and_goes_on(loop: Loop) -> Raised:
    """Rank 1 has not cleared its gradients, and trains on without them."""
    loop.train(1)
    loop.backward()
    loop.step()
    if loop.rank == 0:
        loop.optimizer.zero_grad()
    loop.backward()
    refused = ""
    try:
        loop.step()
    except RuntimeError as error:
        refused = str(error)
    loop.optimizer.zero_grad()
    loop.backward()
    found = loop.raised(loop.step)
    return found._replace(text=refused) if loop.rank == 1 else found


@pytest.fixture(scope="module")
def parted_under_ddp(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Raised]]:
    """What each of two ranks raises under DDP, where a clean step has no round."""
    return run_ranks(2, under_ddp, folder=tmp_path_factory.mktemp("parted"))


@pytest.mark.parametrize("way", ["loads alone", "loads alone later"])
def test_scales_that_differ_are_found_under_ddp(parted_under_ddp: Any, way: str) -> None:
    found, other = (ranks[way] for ranks in parted_under_ddp)
    assert found.steps == other.steps
    for each in (found, other):
        assert each.kind == "ScaleDesync"
        assert "on rank 0" in each.text
        assert "on rank 1" in each.text


def test_a_rank_that_was_refused_under_ddp_is_named_at_the_next_step(parted_under_ddp: Any) -> None:
    other, refused = (ranks["is refused"] for ranks in parted_under_ddp)
    assert other.kind == "RankFailed"
    assert "A step was applied on some ranks and not on others" in other.text
    assert "Rank 1: in a step that others have applied" in other.text
    assert f"RuntimeError: {refused.text}" in other.text
    assert other.afterwards == refused.afterwards == "applied"


OK, REFUSED, FAILED, MISSED = "applied", "ValueError", "RankFailed", "RankFailed, applied"

REFUSALS: dict[str, tuple[list[str], list[str], list[str]]] = {
    # What happens, what rank 0 gets, and what rank 1 gets. The first step compares scales, so that it has a round.
    "at first": (["refuse 1", "clean"], [FAILED, OK], [REFUSED, OK]),
    "when others skip": (["clean", "bad loss, refuse 1", "clean"], [OK, FAILED, OK], [OK, REFUSED, OK]),
    "and goes on": (
        ["clean", "refuse 1", "clean", "clean", "clean"],
        [OK, OK, MISSED, MISSED, MISSED],
        [OK, REFUSED, MISSED, MISSED, MISSED],
    ),
    "twice": (["clean", "refuse 1", "refuse 1", "clean"], [OK, OK, MISSED, MISSED], [OK, REFUSED, REFUSED, MISSED]),
    "and then the other": (
        ["clean", "refuse 1", "refuse 0", "clean"],
        [OK, OK, REFUSED, MISSED],
        [OK, REFUSED, MISSED, MISSED],
    ),
    "until all load": (
        ["clean", "refuse 1", "clean", "load all", "clean"],
        [OK, OK, MISSED, OK, OK],
        [OK, REFUSED, MISSED, OK, OK],
    ),
    "and one loads": (
        ["clean", "refuse 1", "clean", "load 0", "clean", "load 1", "load all"],
        [OK, OK, MISSED, MISSED, MISSED, MISSED, OK],
        [OK, REFUSED, MISSED, MISSED, MISSED, MISSED, OK],
    ),
    "and loads before the others know": (
        ["clean", "refuse 1", "load 1", "clean"],
        [OK, OK, MISSED, MISSED],
        [OK, REFUSED, MISSED, MISSED],
    ),
    "and repeats the step": (
        ["clean", "refuse 1", "repeat 1", "repeat 1", "clean"],
        [OK, OK, MISSED],
        [OK, REFUSED, "RuntimeError", "RuntimeError", MISSED],
    ),
    "as all others": (
        ["clean", "refuse all", "clean", "clean"],
        [OK, REFUSED, "nonfinite_loss", OK],
        [OK, REFUSED, "nonfinite_loss", OK],
    ),
    "by its optimizer": (["clean", "break 1", "clean"], [OK, OK, MISSED], [OK, "RuntimeError", MISSED]),
    "by an interrupt": (["clean", "interrupt 1", "clean"], [OK, OK, MISSED], [OK, "KeyboardInterrupt", MISSED]),
}


@pytest.mark.parametrize("way", REFUSALS)
def test_no_rank_goes_on_after_a_step_that_only_others_have_applied_under_ddp(refused_under_ddp: Any, way: str) -> None:
    _, *expected = REFUSALS[way]
    assert [found[way] for found in refused_under_ddp] == expected


def refused_in_every_way() -> dict[str, list[str]]:
    return {name: Loop("DDP on 2").statuses(events) for name, (events, *_) in REFUSALS.items()}


@pytest.fixture(scope="module")
def refused_under_ddp(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    return run_ranks(2, refused_in_every_way, folder=tmp_path_factory.mktemp("refused"))


def optimizer_raises() -> list[str]:
    """The optimizer of rank 1 raises in a step, after the round in which all ranks have agreed to apply it."""
    return Loop(None).statuses(["clean", "break 1", "clean", "clean"])


def test_no_rank_goes_on_after_an_optimizer_has_raised_on_one(tmp_path: Path) -> None:
    other, broken = run_ranks(2, optimizer_raises, folder=tmp_path)
    assert other == [OK, OK, MISSED, MISSED]
    assert broken == [OK, "RuntimeError", MISSED, MISSED]


def many_fail() -> tuple[str, list[int]]:
    """All ranks but the first are refused."""
    try:
        Loop(None).statuses(["clean"])
        loop = Loop(None)
        loop.backward()
        loop.step(clip_norm=1.0 if loop.rank == 0 else -1.0)
    except (ValueError, RankFailed) as error:
        return type(error).__name__, sorted(getattr(error, "reasons", {}))
    return "", []


def test_several_ranks_that_are_refused_are_all_named(tmp_path: Path) -> None:
    assert run_ranks(4, many_fail, folder=tmp_path) == [("RankFailed", [1, 2, 3]), *[("ValueError", [])] * 3]


def meets_in_groups() -> bool:
    """Groups that share a rank meet, each as often as it does."""
    pairs = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    for group, members in ((pairs[0], (0, 1)), (pairs[1], (0, 2)), (pairs[1], (0, 2)), (None, (0, 1, 2))):
        if dist.get_rank() in members:
            store.meet(group)
    return True


def test_ranks_meet_in_each_group_of_their_own(tmp_path: Path) -> None:
    assert run_ranks(3, meets_in_groups, folder=tmp_path) == [True] * 3


def test_an_error_of_another_rank_is_the_same_when_it_is_pickled() -> None:
    error = RankFailed({1: "ValueError: no"}, applied=True)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reasons, again.applied) == (str(error), {1: "ValueError: no"}, True)


def ends_when_refused() -> None:
    loop = Loop("DDP on 2")
    loop.train(2)
    loop.backward()
    loop.step(clip_norm=1.0 if loop.rank == 0 else -1.0)
    loop.optimizer.zero_grad()
    loop.train(1000)


def test_a_rank_that_ends_when_it_is_refused_under_ddp_ends_the_others(tmp_path: Path) -> None:
    ranks = Ranks(2, ends_when_refused, (), tmp_path)
    assert ranks.wait() == [1, 1]
    assert "`clip_norm` must be" in ranks.output(1)
    assert "RuntimeError" in ranks.output(0) or "RankFailed" in ranks.output(0)


def has_a_gradient_of_its_own() -> None:
    """Rank 1 writes an inf to a gradient that DDP has reduced."""
    store.PATIENCE_S = 2.0
    loop = Loop("DDP on 2")
    loop.train(2)
    loop.backward()
    if loop.rank == 1:
        poison(loop.model.module.head.weight, INF)
    loop.step()
    loop.optimizer.zero_grad()
    loop.train(1000)


def test_a_gradient_written_to_on_one_rank_under_ddp_ends_all_ranks(tmp_path: Path) -> None:
    ranks = Ranks(2, has_a_gradient_of_its_own, (), tmp_path)
    assert ranks.wait() == [1, 1]
    assert "not finite on this rank, and finite on others" in ranks.output(1)
