"""The record of a run of torch: what the rule saw, at no host read and no launch more."""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.recording.files import flush, headers, on_demand, steps  # noqa: F401
from tests.torch.helpers import INF, NAN, OPTIMIZERS, loss_of, poison, small_model
from tests.torch.ranks import launch
from tests.torch.window.test_retry import narrow
from torch import nn

from gradscale import CheckOnly, Dynamic, Headroom, NoScaling, Policy, Seen
from gradscale.engine.culprits import Culprit
from gradscale.policies.histogram import Histogram
from gradscale.recording.form import Step
from gradscale.torch import GradScaler, LossScaler, ShardedGradScaler, host, watch

pytestmark = pytest.mark.usefixtures("on_demand")


def take_step(scaler: Any, model: nn.Module, optimizer: Any, seed: int, bad: float | None, **arguments: Any) -> Any:
    """Takes a step of either scaler, with `bad` in its first gradient, or in the loss where that is a NaN."""
    loss = loss_of(model, seed) * (1 + seed)  # so that the largest gradients are the last
    scaler.note(loss=loss)
    scaler.scale(loss * NAN if bad is NAN else loss).backward()
    if bad is not None:
        poison(next(model.parameters()), INF)
    scaler.step(optimizer, **arguments)
    if isinstance(scaler, GradScaler):
        scaler.update()
    optimizer.zero_grad()
    return scaler.last


def train(
    scaler: Any, model: nn.Module, optimizer: str = "adamw fused", count: int = 40, **arguments: Any
) -> list[tuple[Any, ...]]:
    """Returns what the results of the steps say, of which two are skipped."""
    made, stepped = OPTIMIZERS[optimizer](model.parameters()), []
    for step in range(count):
        stepped.append(take_step(scaler, model, made, step, {7: INF, 20: NAN}.get(step), **arguments))
    return [(result.scale.item(), result.status(), _number(result.grad_norm)) for result in stepped]


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def replayed(path: Path) -> Iterator[Any]:
    """Yields the states that the rule of a record has for what it saw: before each step, and after the last."""
    header, *_ = headers(path)
    policy, state, _ = header.saved()
    yield state
    for step in steps(path):
        seen = Seen(
            finite=np.bool_(step.status == "applied" or (step.amax is not None and np.isfinite(step.amax))),
            loss_finite=np.bool_(step.status != "nonfinite_loss"),
            amax=np.float32(0 if step.amax is None else step.amax),
            upper_share=np.float32(step.share or 0),
        )
        with np.errstate(all="ignore"):
            state = policy.next(state, seen, np)
        yield state


SCALERS: dict[str, Callable[..., Any]] = {
    "LossScaler": lambda model, policy, **options: LossScaler(model, policy, **options),
    "GradScaler": lambda model, policy, **options: GradScaler(
        torch.get_default_device().type, policy=policy, **options
    ),
}
POLICIES = [Dynamic(growth_interval=5), Headroom(), Histogram()]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("arguments", [{}, {"clip_norm": 1.0}], ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("optimizer", ["adamw fused", "sgd foreach"])
@pytest.mark.parametrize("kind", SCALERS)
def test_every_step_is_recorded_and_the_rule_replays_it_exactly(
    tmp_path: Path, kind: str, optimizer: str, policy: Policy, arguments: dict[str, Any]
) -> None:
    path, model = tmp_path / "run.jsonl", small_model()
    scaler = SCALERS[kind](model, policy, record=path)
    made = train(scaler, model, optimizer, **arguments)
    scaler.state_dict()  # catches up
    found = steps(path)
    assert [(step.step, step.scale, step.status) for step in found] == [
        (number, scale, status) for number, (scale, status, _) in enumerate(made)
    ]
    assert [step.norm for step in found] == [None if norm is None else np.float32(norm) for *_, norm in made]
    if isinstance(policy, Histogram) and found[0].share is None:  # a share stays on the device that runs the rule
        assert (kind, optimizer) == ("LossScaler", "adamw fused")
        assert not host.in_host_memory(torch.device("cpu"))
    else:
        *before, after = replayed(path)
        assert [state.scale for state in before] == [scale for scale, *_ in made]
        assert after.to_dict() == scaler._rule.state.to_dict()
    assert len(headers(path)) == 1


@pytest.mark.cpu_only("the culprits of a device come with a later step")
@pytest.mark.parametrize("optimizer", ["adamw fused", "sgd foreach"])
@pytest.mark.parametrize("kind", SCALERS)
def test_a_skipped_step_names_its_culprits(tmp_path: Path, kind: str, optimizer: str) -> None:
    model = small_model()
    scaler = SCALERS[kind](model, Dynamic(), record=tmp_path / "run.jsonl")
    train(scaler, model, optimizer, count=10)
    (skipped,) = [step for step in steps(tmp_path / "run.jsonl") if step.status == "overflow"]
    name = "0.weight" if kind == "LossScaler" else "param_groups[0].params[0]"
    assert [(each.name, each.kind) for each in skipped.culprits] == [(name, "inf")]


def test_a_loss_is_the_number_that_the_tensor_has(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler, losses = LossScaler(model, record=tmp_path / "run.jsonl"), []
    for step in range(5):
        losses.append(loss_of(model, step).item() * (1 + step))
        take_step(scaler, model, optimizer, step, None)
    scaler.state_dict()
    assert [np.float32(step.note["loss"]) for step in steps(tmp_path / "run.jsonl")] == np.array(
        losses, np.float32
    ).tolist()


def test_the_last_step_is_there_when_the_process_ends(tmp_path: Path) -> None:
    model = small_model()
    scaler = LossScaler(model, record=tmp_path / "run.jsonl")
    train(scaler, model, "adamw fused", count=4)
    scaler._memory.recorder.close()
    assert [step.step for step in steps(tmp_path / "run.jsonl")] == [0, 1, 2, 3]


def test_a_retry_begins_a_part_whose_scale_is_the_lower_one(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler(model, Dynamic(init_scale=65536.0), record=tmp_path / "run.jsonl")
    for _ in range(2):
        scaler.backward(narrow(loss_of(model), 1024.0), retries=10)
        scaler.step(optimizer)
        optimizer.zero_grad()
    first, second = steps(tmp_path / "run.jsonl")
    assert (first.scale, first.retries, first.status) == (1024.0, 6, "applied")
    assert (second.scale, second.retries) == (1024.0, 0)
    assert [float(header.saved().state.scale) for header in headers(tmp_path / "run.jsonl")] == [1024.0]


def test_a_scale_that_is_set_begins_a_part(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(torch.get_default_device().type, record=tmp_path / "run.jsonl")
    for step in range(4):
        take_step(scaler, model, optimizer, step, None)
        if step == 1:
            scaler.update(512.0)
        if step == 2:
            scaler.set_growth_factor(4.0)
    assert [step.scale for step in steps(tmp_path / "run.jsonl")] == [65536.0, 65536.0, 512.0, 512.0]
    found = headers(tmp_path / "run.jsonl")
    assert [header.policy["growth_factor"] for header in found] == [2.0, 2.0, 4.0]
    assert [header.resumed for header in found] == [False, True, True]


def test_updates_that_are_merged_are_one_step_of_which_the_last_line_counts(tmp_path: Path) -> None:
    models = [small_model(), small_model(1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = GradScaler(torch.get_default_device().type, record=tmp_path / "run.jsonl")
    for step in range(3):
        scaler.scale(sum(loss_of(model, step) for model in models)).backward()
        if step == 1:
            poison(models[1][0].weight)
        for optimizer in optimizers:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    by_number = {step.step: step for step in steps(tmp_path / "run.jsonl")}
    assert {number: str(step.status) for number, step in by_number.items()} == {
        0: "applied",
        1: "overflow",
        2: "applied",
    }
    assert len(headers(tmp_path / "run.jsonl")) == 1


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_does_not_write(tmp_path: Path, kind: str, copied: Callable[[Any], Any]) -> None:
    path, model = tmp_path / "run.jsonl", small_model()
    scaler = SCALERS[kind](model, Dynamic(), record=path)
    train(scaler, model, "sgd foreach", count=2)
    other, other_model = copied((scaler, model))
    train(other, other_model, "sgd foreach", count=3)
    train(scaler, model, "sgd foreach", count=1)
    assert other.metrics()["applied"] == 5
    assert [step.step for step in steps(path)] == [0, 1, 2]


@pytest.mark.parametrize("kind", SCALERS)
def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path, kind: str) -> None:
    path, model = tmp_path / "run.jsonl", small_model()
    first = SCALERS[kind](model, Headroom(), record=path)
    train(first, model, "sgd foreach", count=3)
    flush()
    second = SCALERS[kind](model, Headroom(), record=path)
    second.load_state_dict(first.state_dict())
    train(second, model, "sgd foreach", count=2)
    assert [step.step for step in steps(path)] == [0, 1, 2, 3, 4]
    # torch's own five entries, which a drop-in saves, hold the counts of no rule but in the text of ours.
    assert headers(path)[1].saved().state == first._rule.state


@pytest.mark.parametrize(("policy", "format"), [(NoScaling(), "FP16"), (CheckOnly(), "BF16"), (Headroom(), "FP16")])
def test_a_run_without_scaling_is_recorded_too(tmp_path: Path, policy: Policy, format: str) -> None:
    model = small_model()
    scaler = LossScaler(model, policy, record=tmp_path / "run.jsonl")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        take_step(scaler, model, optimizer, step, None, clip_norm=1.0)
    scaler.state_dict()
    found = steps(tmp_path / "run.jsonl")
    assert [step.step for step in found] == [0, 1]
    assert all(step.norm for step in found)
    assert headers(tmp_path / "run.jsonl")[0].format == format


def test_a_disabled_drop_in_writes_nothing(tmp_path: Path) -> None:
    model = small_model()
    scaler = GradScaler("cpu", enabled=False, record=tmp_path / "run.jsonl")
    scaler.note(loss=1.0)
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler.update()
    assert not (tmp_path / "run.jsonl").exists()
    assert not scaler._memory.recorder.on


def test_the_scaler_for_fsdp1_takes_a_record(tmp_path: Path) -> None:
    model = small_model()
    scaler = ShardedGradScaler(torch.get_default_device().type, record=tmp_path / "run.jsonl")
    take_step(scaler, model, torch.optim.SGD(model.parameters(), lr=0.1), 0, None)
    assert len(steps(tmp_path / "run.jsonl")) == 1


@pytest.mark.parametrize("optimizer", ["adamw fused", "sgd foreach"])
@pytest.mark.parametrize("kind", SCALERS)
def test_samples_of_watch_are_recorded_with_their_histograms(tmp_path: Path, kind: str, optimizer: str) -> None:
    model = small_model()
    scaler = SCALERS[kind](model, Dynamic(), record=tmp_path / "run.jsonl")
    made = OPTIMIZERS[optimizer](model.parameters())
    with watch(model, scaler, every=2) as watched:
        for step in range(4):
            take_step(scaler, model, made, step, None)
            if kind == "GradScaler":
                watched.step()
        scaler.state_dict()
    found = {step.step: step for step in steps(tmp_path / "run.jsonl")}  # the last line of each
    assert [bool(found[number].watch) for number in range(4)] == [True, False, True, False]
    assert found[0].note
    rows = {(row.name, row.kind): row.amax for row in watched.rows() if row.step == 2}
    assert {(tally.name, tally.kind): tally.amax for tally in found[2].watch} == rows


@pytest.mark.parametrize("kind", SCALERS)
def test_a_summary_is_short(kind: str) -> None:
    model = small_model()
    scaler = SCALERS[kind](model, Dynamic(init_scale=2.0**14))
    train(scaler, model, "sgd foreach", count=10)
    assert scaler.summary() == "scale 2^13, 1 skipped"


def run_on_a_rank(path: str) -> list[Any]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler(parallel, Dynamic(), agree="always", record=path)
    for step in range(3):
        scaler.backward(parallel(torch.full((2, 4), 1.0 + rank)).square().mean())
        if step == 1 and rank == 1:
            poison(model.bias, INF)
        scaler.step(optimizer)
        optimizer.zero_grad()
    return [scaler._memory.recorder.on]


@pytest.mark.parametrize("name", ["run.jsonl", "run-{rank}.jsonl"])
def test_rank_0_writes_the_culprits_of_all_ranks(tmp_path: Path, name: str) -> None:
    found = launch.run_ranks(2, run_on_a_rank, str(tmp_path / name), folder=tmp_path / "ranks")
    each = "{rank}" in name
    assert found == [[True], [each]]
    for rank in range(2) if each else [0]:
        path = tmp_path / name.replace("{rank}", str(rank))
        (header,) = headers(path)
        assert (header.rank, header.ranks) == (rank, 2)
        # The last line is there, although processes that were forked do not call what `atexit` has.
        assert [str(step.status) for step in steps(path)] == ["applied", "overflow", "applied"]
        assert steps(path)[1].culprits == (Culprit("bias", "inf", 1),)
    assert len(list(tmp_path.glob("*.jsonl"))) == 1 + each


# On a device, whose host reads and launches are counted.


def last_lines(path: Path) -> list[Step]:
    return list({step.step: step for step in steps(path)}.values())


@pytest.mark.simulated_only
@pytest.mark.parametrize("arguments", [{}, {"clip_norm": 1.0}], ids=str)
@pytest.mark.parametrize("optimizer", ["adamw fused", "sgd foreach"])
@pytest.mark.parametrize("policy", [Dynamic(), Headroom()], ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("kind", SCALERS)
def test_a_record_makes_the_host_wait_for_nothing(
    tmp_path: Path, kind: str, policy: Policy, optimizer: str, arguments: dict[str, Any]
) -> None:
    from tests.torch.sim import host

    waits = []
    for record in (None, tmp_path / "run.jsonl"):
        model = small_model()
        scaler = SCALERS[kind](model, policy, record=record)
        made = OPTIMIZERS[optimizer](model.parameters())
        for step in range(10):
            with host.waits() as found:
                take_step(scaler, model, made, step, INF if step == 5 else None, **arguments)
            waits.append((len(found.reads), len(found.uploads)))
    assert waits[:10] == waits[10:]
    scaler.state_dict()
    scaler._memory.recorder.close()
    found = last_lines(tmp_path / "run.jsonl")
    assert [step.step for step in found] == list(range(10))
    assert all("loss" in step.note for step in found)
    assert [str(step.status) for step in found] == ["applied"] * 5 + ["overflow"] + ["applied"] * 4
    if kind == "LossScaler":
        assert found[5].culprits == (Culprit("0.weight", "inf"),)


@pytest.mark.simulated_only
def test_without_scaling_the_loss_of_a_busy_device_is_written_when_it_arrives(tmp_path: Path) -> None:
    from tests.torch.sim import host

    model = small_model()
    scaler = LossScaler(model, NoScaling(), record=tmp_path / "run.jsonl")
    made = torch.optim.AdamW(model.parameters(), fused=True)
    with host.busy(), host.waits() as waits:
        take_step(scaler, model, made, 0, None)
    assert waits.reads == []
    host.arrive()
    scaler._memory.recorder.close()
    before, after = steps(tmp_path / "run.jsonl")
    assert (before.note, list(after.note)) == ({}, ["loss"])


@pytest.mark.simulated_only
@pytest.mark.parametrize("kind", SCALERS)
def test_a_device_that_falls_behind_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    from tests.torch.sim import host

    model = small_model()
    scaler = SCALERS[kind](model, Dynamic(), record=tmp_path / "run.jsonl")
    made = torch.optim.AdamW(model.parameters(), fused=True)
    with host.busy():
        take_step(scaler, model, made, 0, None)
        scaler._memory.recorder.close()
        assert not (tmp_path / "run.jsonl").exists()
    host.arrive()
    scaler._memory.recorder.close()
    assert len(steps(tmp_path / "run.jsonl")) == 1


@pytest.mark.simulated_only
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", ["fused", "foreach"])
@pytest.mark.parametrize("kind", SCALERS)
def test_a_record_launches_nothing_on_the_device(tmp_path: Path, kind: str, optimizer: str, clip: bool) -> None:
    from tests.torch.step.test_launches import launches

    def scaler(record: Path | None) -> Callable[[nn.Module], Any]:
        return lambda model: SCALERS[kind](model, "auto", record=record)

    alone = launches(2, {optimizer: True}, clip, scaler(None))
    assert launches(2, {optimizer: True}, clip, scaler(tmp_path / "run.jsonl")) == alone
    assert len(steps(tmp_path / "run.jsonl")) >= len(alone) - 1
