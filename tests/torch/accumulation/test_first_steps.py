"""In the first steps of a run, a backward pass that overflows is run again without being asked to."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.accumulation.test_retry import OverflowAbove
from tests.torch.drop_in.helpers import grad_of
from tests.torch.helpers import INF, NAN, poison, same, weights
from tests.torch.process_group import end_process_group
from tests.torch.short_runs import fine_tuned_model, large_loss, lost_steps
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradscale import Dynamic, Histogram, LogMax, Policy, Static, preset
from gradscale.engine.retries import FIRST_STEPS
from gradscale.policies.headroom import Headroom
from gradscale.torch import LossScaler, StepResult

pytestmark = pytest.mark.usefixtures("either_way")


def setup(policy: Policy | str = "auto") -> tuple[nn.Sequential, torch.optim.Optimizer, LossScaler]:
    model = fine_tuned_model()
    return model, torch.optim.SGD(model.parameters(), lr=1e-4), LossScaler(model, policy)


def first_result(policy: Policy | str = "auto", **kwargs: Any) -> StepResult:
    model, optimizer, scaler = setup(policy)
    scaler.backward(large_loss(model), **kwargs)
    return scaler.step(optimizer)


def take_small_steps(scaler: LossScaler, model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    """Applies steps whose gradients are a millionth of the usual, so that the scale becomes too high for those."""
    for _ in range(count):
        scaler.backward(large_loss(model) * 1e-6)
        assert not scaler.step(optimizer).skipped()
        optimizer.zero_grad()


@pytest.mark.parametrize("steps", [3, 10, 50])
def test_a_short_run_loses_no_step(steps: int) -> None:
    model, optimizer, scaler = setup()

    def train_step(loss: Tensor) -> None:
        scaler.backward(loss)
        scaler.step(optimizer)

    assert lost_steps(model, optimizer, train_step, steps) == []


@pytest.mark.not_simulated("torch's scaler has no kernels there")
@pytest.mark.parametrize(("steps", "at_least"), [(3, 3), (10, 9), (50, 9)])
def test_torchs_scaler_loses_the_first_steps_of_the_same_run(steps: int, at_least: int) -> None:
    model = fine_tuned_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(torch.get_default_device().type)

    def train_step(loss: Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    lost = lost_steps(model, optimizer, train_step, steps)
    assert lost[:at_least] == list(range(at_least))


@pytest.mark.parametrize("policy", ["auto", Headroom(), LogMax()], ids=str)
def test_policies_that_predict_retry_once_in_the_first_step(policy: Policy | str) -> None:
    result = first_result(policy)
    assert result.retries == 1
    assert not result.skipped()


@pytest.mark.parametrize("policy", [Dynamic(), Static(65536.0), Histogram(), preset("openseq2seq")], ids=str)
def test_other_policies_do_not(policy: Policy) -> None:
    result = first_result(policy)
    assert result.retries == 0
    assert result.skipped()


def test_zero_retries_switch_it_off() -> None:
    assert first_result(retries=0).skipped()


def test_the_update_is_the_one_that_the_lower_scale_makes() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(large_loss(model))
    result = scaler.step(optimizer)
    expected, its_optimizer, low = setup(Static(float(result.scale)))
    low.backward(large_loss(expected))
    low.step(its_optimizer)
    assert same(weights(model), weights(expected))


def test_every_micro_batch_of_the_first_step_may_be_run_again() -> None:
    def run(scaler: LossScaler, model: nn.Module, optimizer: torch.optim.Optimizer) -> StepResult:
        for micro_batch, weight in enumerate((1e-6, 1.0, 1.0)):  # the second overflows, and the first is rescaled
            scaler.backward(large_loss(model, micro_batch) * weight)
        return scaler.step(optimizer)

    model, optimizer, scaler = setup()
    result = run(scaler, model, optimizer)
    assert (result.retries, result.skipped()) == (1, False)
    expected, its_optimizer, _ = setup()
    scales = (65536.0, float(result.scale), float(result.scale))
    grads: list[Any] = [0.0] * 4
    for micro_batch, (weight, scale) in enumerate(zip((1e-6, 1.0, 1.0), scales, strict=True)):
        its_optimizer.zero_grad()
        (large_loss(expected, micro_batch) * weight * scale).backward()
        ratio = scales[-1] / scale
        grads = [total + grad_of(each) * ratio for total, each in zip(grads, expected.parameters(), strict=True)]
    for parameter, grad in zip(expected.parameters(), grads, strict=True):
        parameter.grad = grad / scales[-1]
    its_optimizer.step()
    assert same(weights(model), weights(expected))


@pytest.mark.parametrize("policy", ["auto", LogMax()], ids=str)
@pytest.mark.parametrize("applied", [1, 2, FIRST_STEPS - 1])
def test_gradients_that_outgrow_the_scale_of_the_steps_before_lose_no_step(applied: int, policy: Policy | str) -> None:
    model, optimizer, scaler = setup(policy)
    take_small_steps(scaler, model, optimizer, applied)
    scaler.backward(large_loss(model))
    result = scaler.step(optimizer)
    assert (result.retries, result.skipped()) == (1, False)


def test_there_is_no_retry_after_the_first_steps() -> None:
    model, optimizer, scaler = setup()
    take_small_steps(scaler, model, optimizer, FIRST_STEPS)
    scaler.backward(large_loss(model) * 1e6)
    result = scaler.step(optimizer)
    assert (result.retries, result.skipped()) == (0, True)


def test_a_skipped_step_does_not_end_it() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(large_loss(model) * 1e-6)
    poison(next(model.parameters()), NAN)
    assert scaler.step(optimizer).skipped()
    optimizer.zero_grad()
    scaler.backward(large_loss(model) * 1e6)
    assert scaler.step(optimizer).retries == 1


@pytest.mark.parametrize("policy", ["auto", LogMax()], ids=str)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("zeros", [1, 2, 5])
def test_steps_whose_gradients_are_all_zero_do_not_end_it(zeros: int, fused: bool, policy: Policy | str) -> None:
    """As those of GRPO, for a batch whose rewards are all the same: the scale rises at each of them."""
    model, _, scaler = setup(policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=fused)
    for step in range(zeros + 2):
        optimizer.zero_grad()
        scaler.backward(large_loss(model) * (step >= zeros))
        result = scaler.step(optimizer)
        assert not result.skipped()
        assert result.retries == (min(zeros + 1, 3) if step == zeros else 0)


def test_a_run_whose_gradients_were_all_zero_goes_on_with_it_when_loaded() -> None:
    model, optimizer, scaler = setup()
    for _ in range(2):
        scaler.backward(large_loss(model) * 0)
        scaler.step(optimizer)
        optimizer.zero_grad()
    _, _, loaded = setup()
    loaded.load_state_dict(scaler.state_dict())
    loaded.backward(large_loss(model))
    assert not loaded.step(optimizer).skipped()


@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_loss_that_is_not_finite_is_not_tried_again(bad: float) -> None:
    model, optimizer, scaler = setup()
    with torch.no_grad():
        next(model.parameters())[0, 0] = bad
    scaler.backward(large_loss(model))
    result = scaler.step(optimizer)
    assert (result.retries, result.status()) == (0, "nonfinite_loss")
    assert scaler.loss_scale.item() == 65536.0


@pytest.mark.parametrize(("applied", "retries"), [(FIRST_STEPS - 1, 1), (FIRST_STEPS, 0)])
def test_a_loaded_run_goes_on_where_it_was(applied: int, retries: int) -> None:
    model, optimizer, scaler = setup()
    take_small_steps(scaler, model, optimizer, applied)
    model, optimizer, loaded = setup()
    loaded.load_state_dict(scaler.state_dict())
    loaded.backward(large_loss(model) * 1e6)
    assert loaded.step(optimizer).retries == retries


def kept_loss(model: nn.Sequential) -> tuple[Tensor, Tensor, "weakref.ref[Tensor]"]:
    """Returns a loss, the output it was made from, and a reference to an activation inside."""
    inside: list[weakref.ref[Tensor]] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        inside.append(weakref.ref(output))

    model[1].register_forward_hook(keep)
    out = model(torch.randn(4, 8))
    return out.square().sum(), out, inside[0]


@pytest.mark.not_simulated("errors in hooks of a backward pass: torch ends the process")
@pytest.mark.parametrize(("size", "retries"), [(1.0, 0), (1e34, 1)], ids=["clean", "run again"])
def test_the_graph_of_the_first_step_is_freed_as_that_of_any_other(size: float, retries: int) -> None:
    model, optimizer, scaler = setup()
    loss, out, activation = kept_loss(model)
    loss = loss * size
    scaler.backward(loss)
    assert scaler.step(optimizer).retries == retries
    assert activation() is None
    assert out.grad_fn is not None
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()


def test_a_graph_that_is_to_be_kept_is_kept() -> None:
    model, _, scaler = setup()
    loss, _, activation = kept_loss(model)
    scaler.backward(loss, retain_graph=True)
    assert activation() is not None
    scaler.backward(loss)


def narrow(loss: Tensor) -> Tensor:
    return OverflowAbove.apply(loss, 1024.0)  # type: ignore[return-value]


def reentrant(model: nn.Module) -> Tensor:
    x = torch.randn(8, 8, requires_grad=True)
    return checkpoint(model, x, use_reentrant=True).sum() * 1e6  # type: ignore[union-attr, operator]


UNKNOWN = {
    "a function of the user's": lambda model: narrow(large_loss(model)),
    "reentrant checkpointing": reentrant,
}


@pytest.mark.parametrize("loss_of", UNKNOWN.values(), ids=UNKNOWN)
def test_a_graph_with_other_functions_than_torchs_is_not_run_again_unasked(loss_of: Any) -> None:
    model, optimizer, scaler = setup(Headroom(init_scale=2.0**100))
    scaler.backward(loss_of(model))
    assert scaler.step(optimizer).retries == 0
    optimizer.zero_grad()
    scaler.backward(loss_of(model), retries=1)


def test_a_checkpointed_model_that_is_not_reentrant_is_run_again() -> None:
    model, optimizer, scaler = setup()
    x = torch.randn(8, 8)
    with torch.autocast(x.device.type, dtype=torch.float16):
        out = checkpoint(model, x, use_reentrant=False)
    scaler.backward(out.float().sum() * 1e2)  # type: ignore[union-attr]
    result = scaler.step(optimizer)
    assert (result.retries, result.skipped()) == (1, False)


@pytest.mark.parametrize("kwargs", [{"create_graph": True}, {"gradient": torch.tensor(1.0, device="cpu")}], ids=str)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_arguments_of_the_backward_pass_switch_it_off(kwargs: dict[str, Any]) -> None:
    kwargs = {
        name: value.to(torch.get_default_device()) if name == "gradient" else value for name, value in kwargs.items()
    }
    assert first_result(**kwargs).retries == 0


def test_a_scaler_without_the_model_retries_nothing() -> None:
    model, optimizer, _ = setup()
    scaler = LossScaler()
    scaler.backward(large_loss(model))
    assert scaler.step(optimizer).retries == 0


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    end_process_group()


@pytest.mark.cpu_only("gloo, which has no other device")
@pytest.mark.usefixtures("process_group")
def test_a_data_parallel_model_retries_nothing() -> None:
    model, optimizer, _ = setup()
    parallel = nn.parallel.DistributedDataParallel(model)
    scaler = LossScaler(parallel)
    scaler.backward(large_loss(parallel))
    assert scaler.step(optimizer).retries == 0
