"""Ranks that do not step alike: all of them raise, at once, and say why."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from tests.torch.ranks.gpt import EXACT, GPT, batch_of
from tests.torch.ranks.launch import run_ranks
from tests.torch.ranks.layouts import LAYOUTS, case
from tests.torch.ranks.soak import Run
from tests.torch.ranks.whole import digest_of, whole_state

from gradscale import Dynamic
from gradscale.torch import LossScaler

pytestmark = pytest.mark.cpu_only("gloo, which has no other device")


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


def has_other_arguments(loop: Loop) -> Raised:
    """Rank 1 clips, and rank 0 does not."""
    loop.backward()
    return loop.raised(lambda: loop.step(clip_norm=None if loop.rank == 0 else 1.0))


def has_another_bound(loop: Loop, name: str = "clip_norm") -> Raised:
    """The ranks clip to different bounds."""
    loop.backward()
    return loop.raised(lambda: loop.step(**{name: 1.0 + loop.rank}))


def in_every_way(layout: str | None) -> dict[str, Raised]:
    ways: dict[str, Callable[[Loop], Raised]] = {
        "loads alone": loads_alone,
        "loads alone later": lambda loop: loads_alone(loop, after=3),
        "has other arguments": has_other_arguments,
        "has another clip_norm": has_another_bound,
        "has another clip_value": lambda loop: has_another_bound(loop, "clip_value"),
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


@pytest.mark.parametrize("way", ["has other arguments", "has another clip_norm", "has another clip_value"])
def test_ranks_with_other_arguments_all_raise(parted: Any, way: str) -> None:
    for found in (ranks[way] for ranks in parted):
        assert found.kind == "RuntimeError"
        assert "same arguments" in found.text
        assert found.untouched
        assert found.afterwards == "applied"


def under_ddp() -> dict[str, Raised]:
    ways: dict[str, Callable[[Loop], Raised]] = {
        "loads alone": loads_alone,
        "loads alone, before a skip": loads_alone_and_skips,
        "has another clip_norm": has_another_bound,
    }
    return {name: way(Loop("DDP on 2")) for name, way in ways.items()}


def loads_alone_and_skips(loop: Loop) -> Raised:
    """Rank 0 loads another scale than rank 1 has, and a step whose gradients are not finite follows."""
    loop.train(3)
    if loop.rank == 0:
        loop.scaler.load_state_dict(LossScaler(policy=Dynamic(init_scale=1024.0)).state_dict())
    loop.backward(float("nan") if loop.rank == 1 else 1.0)
    return loop.raised(loop.step)


@pytest.fixture(scope="module")
def parted_under_ddp(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Raised]]:
    """What each of two ranks raises under DDP, where a clean step has no round."""
    return run_ranks(2, under_ddp, folder=tmp_path_factory.mktemp("parted"))


def test_bounds_that_differ_are_found_under_ddp_at_the_first_step(parted_under_ddp: Any) -> None:
    for found in (ranks["has another clip_norm"] for ranks in parted_under_ddp):
        assert found.kind == "RuntimeError"
        assert "different values of `clip_norm` or `clip_value`" in found.text
        assert found.untouched


@pytest.mark.parametrize("way", ["loads alone", "loads alone, before a skip"])
def test_scales_that_differ_are_found_under_ddp(parted_under_ddp: Any, way: str) -> None:
    found, other = (ranks[way] for ranks in parted_under_ddp)
    assert found.steps == other.steps
    for each in (found, other):
        assert each.kind == "ScaleDesync"
        assert "on rank 0" in each.text
        assert "on rank 1" in each.text
