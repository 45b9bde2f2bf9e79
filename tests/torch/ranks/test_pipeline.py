"""Pipelines: the loss is on the last stage, and all stages take the steps that one process would take."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.helpers import INF, NAN, batch, poison, same, small_model, weights
from tests.torch.ranks.counting import counting
from tests.torch.ranks.launch import run_ranks
from torch import Tensor, nn

from gradscale import Dynamic, Headroom, NoScaling, Policy
from gradscale.torch import LossScaler, StepResult, compat

SCHEDULES = ["ScheduleGPipe", *(["Schedule1F1B"] if compat.has_grad_dtype() else [])]
"""torch 2.6 waits for ever in 1F1B with gloo, also without a scaler; torch 2.10, with `grad_dtype`, does not."""
MICROBATCHES = 4  # a power of two: its division is exact, whenever it is done
EVENTS = ["clean", "overflow on stage 0", "clean", "overflow on stage 1", "bad loss", "clean", "clean"]
STATUSES = ["applied", "overflow", "applied", "overflow", "nonfinite_loss", "applied", "applied"]
SETTINGS: dict[str, tuple[Policy, float | None]] = {
    "dynamic": (Dynamic(init_scale=2.0**10, growth_interval=2), None),
    "headroom, clip": (Headroom(), 0.5),
}
"""Policies, with a bound on the norm."""
BREAK = 1e9
"""A target that the loss function answers with NaN."""

mse = nn.functional.mse_loss


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return torch.where(target[0, 0] == BREAK, NAN, 1.0) * mse(output, target)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    x, y = batch(step)
    if EVENTS[step] == "bad loss":
        y[0] = BREAK
    return x, y


def inject(step: int, first: nn.Module | None, last: nn.Module | None) -> None:
    """Puts the overflow of this step into the gradients of the stage that has it, where that stage is here."""
    for stage, module in enumerate((first, last)):
        if module is not None and EVENTS[step] == f"overflow on stage {stage}":
            poison(next(module.parameters()), INF)


def facts(result: StepResult) -> tuple[Any, ...]:
    norm = None if result.grad_norm is None else result.grad_norm.item()
    return str(result.status()), result.scale.item(), result.next_scale.item(), norm


def train_one_process(policy: Policy, clip_norm: float | None) -> dict[str, Any]:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = LossScaler(model, policy)
    steps: list[Any] = []
    losses: list[list[float]] = []
    for step in range(len(EVENTS)):
        losses.append([])
        for x, y in zip(*(each.chunk(MICROBATCHES) for each in batch_of(step)), strict=True):
            loss = loss_fn(model(x), y)
            scaler.backward(loss / MICROBATCHES)
            losses[-1].append(loss.item())
        inject(step, model[:2], model[2:])
        steps.append(facts(scaler.step(optimizer, clip_norm=clip_norm)))
        optimizer.zero_grad()
    return {"steps": steps, "losses": losses, "weights": weights(model)}


def train_stage(kind: str, policy: Policy, clip_norm: float | None) -> dict[str, Any]:
    from torch.distributed import pipelining

    rank, whole = dist.get_rank(), small_model()
    module = (whole[:2], whole[2:])[rank]
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    scaler = LossScaler(module, policy, distinct=dist.group.WORLD)
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = getattr(pipelining, kind)(stage, MICROBATCHES, loss_fn=scaler.wrap_loss(loss_fn))
    # New memory is filled with NaN: that of the call by which a schedule finds out shapes, too.
    torch.use_deterministic_algorithms(True)
    steps: list[Any] = []
    losses: list[list[float]] = []
    rounds: list[list[str]] = []
    for step in range(len(EVENTS)):
        x, y = batch_of(step)
        shown: list[Tensor] = []
        schedule.step(*([x] if rank == 0 else []), target=y if rank == 1 else None, losses=shown)
        losses.append([loss.item() for loss in shown])
        if not getattr(schedule, "scale_grads", False):  # torch up to 2.7 leaves the division to the user
            for parameter in module.parameters():
                parameter.grad /= MICROBATCHES  # type: ignore[operator]
        inject(step, *((module, None) if rank == 0 else (None, module)))
        with counting() as begun:
            steps.append(facts(scaler.step(optimizer, clip_norm=clip_norm)))
        rounds.append(begun)
        optimizer.zero_grad()
    return {"steps": steps, "losses": losses, "weights": weights(module), "rounds": rounds}


def train_stages() -> dict[Any, Any]:
    return {(kind, name): train_stage(kind, *settings) for kind in SCHEDULES for name, settings in SETTINGS.items()}


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_ranks(2, train_stages, folder=tmp_path_factory.mktemp("pipeline"))


@pytest.mark.cpu_only("gloo")
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("name", SETTINGS)
def test_two_stages_take_the_steps_of_one_process(stages: list[dict[Any, Any]], kind: str, name: str) -> None:
    expected = train_one_process(*SETTINGS[name])
    first, last = (found[kind, name] for found in stages)
    assert [status for status, *_ in expected["steps"]] == STATUSES
    assert first["steps"] == last["steps"]
    for (*found, norm), (*wanted, wanted_norm) in zip(first["steps"], expected["steps"], strict=True):
        assert found == wanted
        assert norm == (None if wanted_norm is None else pytest.approx(wanted_norm, rel=1e-6))
    trained = [*first["weights"], *last["weights"]]
    if SETTINGS[name][1] is None:
        assert same(trained, expected["weights"])
    else:  # the norm, and with it the factor of the clip, is summed in another order
        for mine, theirs in zip(trained, expected["weights"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    for mine, theirs in zip(last["losses"], expected["losses"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6, nan_ok=True)
    assert not any(first["losses"])


@pytest.mark.cpu_only("gloo")
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_clean_step_of_stages_has_one_round(stages: list[dict[Any, Any]], kind: str, name: str) -> None:
    for found in stages:
        rounds = zip(STATUSES, found[kind, name]["rounds"], strict=True)
        assert [begun for status, begun in rounds if status == "applied"] == [["all_reduce"]] * 4


class Last:
    """The last stage of a pipeline in one process: its schedule differentiates what the loss function returns."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.model = small_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = LossScaler(self.model, policy or Dynamic(init_scale=8.0))
        self.loss_fn = self.scaler.wrap_loss(mse)

    def loss(self, factor: float = 1.0) -> Tensor:
        x, y = batch()
        return self.loss_fn(self.model(x) * factor, y)


class Stage:
    """A stage before the last: it gets gradients for its outputs, which are scaled."""

    def __init__(self, *, has_model: bool = True) -> None:
        self.model = small_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = LossScaler(self.model if has_model else None, Dynamic(init_scale=8.0))
        self.scaler.wrap_loss(mse)

    def backward(self) -> None:
        output = self.model(batch()[0])
        output.backward(torch.full_like(output, 8.0))


def plain_gradients(last: Last) -> list[Tensor]:
    x, y = batch()
    return list(torch.autograd.grad(mse(last.model(x), y), list(last.model.parameters())))


def gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def test_the_loss_has_its_own_value_and_scaled_gradients() -> None:
    last = Last()
    loss = last.loss()
    assert loss.item() == mse(last.model(batch()[0]), batch()[1]).item()
    expected = plain_gradients(last)
    loss.backward()
    assert same(gradients(last.model), [8.0 * each for each in expected])
    assert last.scaler.step(last.optimizer).applied
    assert same(gradients(last.model), expected)


def test_a_narrow_loss_is_widened() -> None:
    last = Last()
    loss_fn = last.scaler.wrap_loss(lambda output, target: mse(output, target).half())
    x, y = batch()
    loss = loss_fn(last.model(x), y)
    assert loss.dtype is torch.float32
    loss.backward()
    assert last.scaler.step(last.optimizer).applied


@pytest.mark.parametrize("bad", [INF, NAN])
def test_calls_that_find_out_shapes_are_ignored(bad: float) -> None:
    """A schedule calls the loss function on uninitialized memory, and differentiates by the inputs of the stage."""
    last = Last()
    x, y = batch()
    received = torch.full_like(x, bad, requires_grad=True)
    assert torch.autograd.grad([last.loss_fn(last.model(received), y)], [received], allow_unused=True)
    last.loss().backward()
    result = last.scaler.step(last.optimizer)
    assert (str(result.status()), result.scale.item()) == ("applied", 8.0)


def test_they_are_ignored_by_a_stage_without_parameters() -> None:
    last = Last()
    received = torch.full((16, 2), NAN, requires_grad=True)
    torch.autograd.grad(last.loss_fn(received * 2.0, batch()[1]), received)
    last.loss().backward()
    assert last.scaler.step(last.optimizer).applied


def test_a_loss_that_is_not_finite_is_reported_and_keeps_the_scale() -> None:
    last = Last()
    last.loss(NAN).backward()
    result = last.scaler.step(last.optimizer)
    assert (str(result.status()), result.next_scale.item()) == ("nonfinite_loss", 8.0)


def test_one_that_is_never_differentiated_is_not_counted() -> None:
    last = Last()
    with torch.no_grad():
        assert last.loss(NAN).isnan()
    last.loss(NAN)
    last.loss().backward()
    assert last.scaler.step(last.optimizer).applied


def test_a_loss_function_is_wrapped_once() -> None:
    scaler = LossScaler(policy=Dynamic())
    once = scaler.wrap_loss(nn.MSELoss())
    for other in (scaler, LossScaler(policy=Dynamic())):
        with pytest.raises(ValueError, match="scaled twice"):
            other.wrap_loss(once)


@pytest.mark.parametrize("call", [LossScaler.scale, LossScaler.backward, partial(LossScaler.backward, retries=1)])
def test_a_loss_function_may_not_scale_the_loss_itself(call: Any) -> None:
    last = Last()
    loss_fn = last.scaler.wrap_loss(lambda output, target: call(last.scaler, mse(output, target)))
    x, y = batch()
    with pytest.raises(RuntimeError, match="scaled twice"):
        loss_fn(last.model(x), y)
    last.loss().backward()
    last.scaler.backward(mse(last.model(x), y))  # a loss of the stage's own
    assert last.scaler.step(last.optimizer).applied


def test_without_a_scale_the_loss_function_is_as_it_was() -> None:
    last = Last(NoScaling())
    last.loss().backward()
    assert same(gradients(last.model), plain_gradients(last))
    assert last.scaler.step(last.optimizer).applied


@pytest.fixture(params=[True, False], ids=["model", "no model"])
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(has_model=request.param)


def test_a_stage_without_a_loss_divides_by_the_scale(stage: Stage) -> None:
    output = stage.model(batch()[0])
    expected = torch.autograd.grad(output, list(stage.model.parameters()), torch.ones_like(output))
    for _ in range(2):
        stage.optimizer.zero_grad()
        stage.backward()
    result = stage.scaler.step(stage.optimizer, norm=True)
    assert (str(result.status()), result.scale.item()) == ("applied", 8.0)
    assert same(gradients(stage.model), expected)


def test_a_stage_without_a_backward_pass_is_refused(stage: Stage) -> None:
    with pytest.raises(RuntimeError, match=r"no backward pass of a scaled loss was run on this stage"):
        stage.scaler.step(stage.optimizer)
    stage.backward()
    assert stage.scaler.step(stage.optimizer).applied
    with pytest.raises(RuntimeError, match=r"Call `schedule.step\(...\)`, .* before every `scaler.step"):
        stage.scaler.step(stage.optimizer)


def test_gradients_that_a_stage_did_not_clear_are_refused() -> None:
    stage = Stage()
    stage.backward()
    stage.scaler.step(stage.optimizer)
    stage.backward()
    with pytest.raises(RuntimeError, match="Gradients from before the last step are still there"):
        stage.scaler.step(stage.optimizer)


def test_the_pass_that_finds_out_shapes_does_not_open_the_window_of_a_stage() -> None:
    stage = Stage()
    received = batch()[0].requires_grad_()
    torch.autograd.grad(stage.model(received).sum(), received)
    with pytest.raises(RuntimeError, match="no backward pass of a scaled loss was run"):
        stage.scaler.step(stage.optimizer)


def test_gradients_that_were_not_scaled_are_refused_on_the_stage_that_has_the_loss() -> None:
    last = Last()
    last.loss().backward()
    last.scaler.step(last.optimizer)
    last.optimizer.zero_grad()
    x, y = batch()
    mse(last.model(x), y).backward()
    with pytest.raises(RuntimeError, match="no backward pass of a scaled loss was run"):
        last.scaler.step(last.optimizer)


def test_a_frozen_stage_takes_part_without_gradients() -> None:
    stage = Stage()
    stage.model.requires_grad_(False)
    stage.model(batch()[0])
    result = stage.scaler.step(stage.optimizer)
    assert not result.attempted


def test_an_input_that_is_passed_on_says_nothing_about_the_stage() -> None:
    stage = Stage()
    passing = nn.Sequential()
    scaler = LossScaler([passing, stage.model], Dynamic(init_scale=8.0))
    scaler.wrap_loss(mse)
    passing(batch()[0].requires_grad_()).sum().backward()
    with pytest.raises(RuntimeError, match="no backward pass of a scaled loss was run"):
        scaler.step(stage.optimizer)


def test_a_copy_of_stage_and_scaler_goes_on_by_itself() -> None:
    stage = Stage()
    stage.backward()
    stage.scaler.step(stage.optimizer)
    stage.optimizer.zero_grad()
    stage.model, stage.optimizer, stage.scaler = copy.deepcopy((stage.model, stage.optimizer, stage.scaler))
    stage.backward()
    assert stage.scaler.step(stage.optimizer).applied


def test_a_schedule_may_split_the_backward_pass_by_inputs_and_by_weights() -> None:
    """As schedules without bubbles do: by `autograd.grad`, with the gradients of the weights added by hand."""
    last = Last()
    expected = [8.0 * each for each in plain_gradients(last)]
    found = torch.autograd.grad(last.loss(), list(last.model.parameters()))
    for parameter, grad in zip(last.model.parameters(), found, strict=True):
        parameter.grad = grad
    assert same(gradients(last.model), expected)
    assert last.scaler.step(last.optimizer).applied


def test_a_stage_may_have_several_outputs() -> None:
    stage = Stage()
    doubled = nn.ModuleDict({"inside": stage.model})
    doubled.forward = lambda x: (stage.model(x), stage.model(x))  # type: ignore[method-assign]
    stage.scaler = LossScaler(doubled, Dynamic(init_scale=8.0))
    stage.scaler.wrap_loss(mse)
    for _ in range(2):
        outputs = doubled(batch()[0])
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    assert stage.scaler.step(stage.optimizer).applied
