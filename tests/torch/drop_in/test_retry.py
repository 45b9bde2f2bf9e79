"""`GradScaler.backward`: `scale(loss).backward()`, run again at a lower scale if it overflows."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.drop_in.helpers import OURS, grad_of, last_of
from tests.torch.helpers import INF, NAN, all_finite, same, weights
from tests.torch.process_group import end_process_group
from tests.torch.short_runs import fine_tuned_model, large_loss, lost_steps
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradscale import Dynamic, Headroom, Static
from gradscale.torch import GradScaler

pytestmark = pytest.mark.usefixtures("either_way")


def setup(**kwargs: Any) -> tuple[nn.Sequential, torch.optim.Optimizer, GradScaler]:
    model = fine_tuned_model()
    scaler = OURS(torch.get_default_device().type, **kwargs)
    return model, torch.optim.SGD(model.parameters(), lr=1e-4), scaler


def step(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> Any:
    scaler.step(optimizer)
    scaler.update()
    return last_of(scaler)


@pytest.mark.parametrize("steps", [3, 10, 50])
def test_a_short_run_loses_no_step(steps: int) -> None:
    model, optimizer, scaler = setup(policy="auto")

    def train_step(loss: Tensor) -> None:
        scaler.backward(loss)
        step(scaler, optimizer)

    assert lost_steps(model, optimizer, train_step, steps) == []


def test_it_is_the_run_of_a_loss_scaler() -> None:
    from gradscale.torch import LossScaler

    policy = Headroom(init_scale=2.0**16)
    model, optimizer, scaler = setup(policy=policy)
    other, its_optimizer, _ = setup()
    loss_scaler = LossScaler(other, policy)
    for seed in range(10):
        for each in (optimizer, its_optimizer):
            each.zero_grad()
        scaler.backward(large_loss(model, seed), retries=2)
        loss_scaler.backward(large_loss(other, seed), retries=2)
        result, expected = step(scaler, optimizer), loss_scaler.step(its_optimizer)
        assert result.retries == expected.retries
        assert result.retries > 0 or seed > 0
        assert (result.scale, result.next_scale) == (expected.scale, expected.next_scale)
        assert same(weights(model), weights(other))


@pytest.mark.parametrize("kwargs", [{}, {"policy": Headroom(init_scale=2.0**16)}], ids=str)
def test_a_backward_pass_that_overflows_is_not_run_again_unasked(kwargs: dict[str, Any]) -> None:
    model, optimizer, scaler = setup(**kwargs)
    scaler.backward(large_loss(model))
    result = step(scaler, optimizer)
    assert (result.retries, result.skipped()) == (0, True)


@pytest.mark.parametrize(
    "kwargs", [{}, {"policy": Dynamic()}, {"hysteresis": 2}, {"policy": Dynamic(growth_interval=1)}], ids=str
)
def test_torchs_rule_halves_the_scale_until_the_pass_is_finite(kwargs: dict[str, Any]) -> None:
    model, optimizer, scaler = setup(**kwargs)
    scaler.backward(large_loss(model), retries=20)
    result = step(scaler, optimizer)
    assert not result.skipped()
    assert result.scale == 2.0 ** (16 - result.retries)
    grows = kwargs.get("policy") == Dynamic(growth_interval=1)
    assert scaler.get_scale() == result.scale * (2 if grows else 1)
    assert scaler.metrics()["skipped"] == 0


def test_the_update_is_the_one_that_the_lower_scale_makes() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(large_loss(model), retries=20)
    result = step(scaler, optimizer)
    expected, its_optimizer, low = setup(init_scale=float(result.scale))
    low.scale(large_loss(expected)).backward()
    step(low, its_optimizer)
    assert same(weights(model), weights(expected))


def test_a_pass_after_another_one_of_the_step_is_not_run_again() -> None:
    model, optimizer, scaler = setup()
    scaler.backward(large_loss(model) * 1e-6, retries=1)
    scaler.backward(large_loss(model), retries=20)
    result = step(scaler, optimizer)
    assert (result.retries, result.scale.item(), str(result.status())) == (0, 65536.0, "overflow")


@pytest.mark.parametrize("kwargs", [{}, {"policy": "auto"}], ids=str)
def test_a_pass_that_no_scale_helps_leaves_the_rule_as_one_without_retries(kwargs: dict[str, Any]) -> None:
    def run(retries: int) -> tuple[list[Tensor], float, float, float]:
        torch.manual_seed(0)
        bad, good = nn.Linear(2, 2), nn.Linear(2, 2)
        scaler = OURS(torch.get_default_device().type, **kwargs)
        optimizer = torch.optim.SGD([*bad.parameters(), *good.parameters()], lr=1.0)
        x = torch.ones(1, 2)
        hidden = bad(x)
        hidden.register_hook(lambda grad: grad * INF)
        scaler.backward(hidden.sum() + good(x).sum(), retries=retries)
        made, before = [grad_of(each).clone() for each in good.parameters()], scaler.get_scale()
        made_with = step(scaler, optimizer).scale
        return made, float(made_with), before, scaler.get_scale()

    grads, made_with, before, after = run(3)
    expected, its_scale, its_before, its_after = run(0)
    assert same([each / made_with for each in grads], [each / its_scale for each in expected])
    assert (before, after) == (its_before, its_after)


@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_loss_that_is_not_finite_is_not_tried_again(bad: float) -> None:
    model, optimizer, scaler = setup(policy="auto")
    scaler.backward(large_loss(model) * bad, retries=3)
    result = step(scaler, optimizer)
    assert (result.retries, result.status()) == (0, "nonfinite_loss")


def test_a_static_scale_is_not_lowered() -> None:
    model, optimizer, scaler = setup(policy=Static(65536.0))
    scaler.backward(large_loss(model), retries=3)
    result = step(scaler, optimizer)
    assert (result.retries, result.skipped()) == (0, True)
    assert scaler.get_scale() == 65536.0


def test_a_disabled_scaler_runs_the_backward_pass() -> None:
    model, _, scaler = setup(enabled=False)
    scaler.backward(large_loss(model) * 1e-6, retries=1)
    assert all_finite(parameter.grad for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.not_simulated("errors in hooks of a backward pass: torch ends the process")
def test_a_backward_pass_that_raises_leaves_everything_as_it_was() -> None:
    model, optimizer, scaler = setup()
    passes: list[int] = []

    def explode(grad: Tensor) -> Tensor:
        passes.append(1)
        if len(passes) == 2:
            raise ZeroDivisionError("in backward")
        return grad * INF

    loss = large_loss(model)
    loss.register_hook(explode)
    with pytest.raises(ZeroDivisionError, match="in backward"):
        scaler.backward(loss, retries=5)
    assert scaler.get_scale() == 65536.0
    assert all(parameter.grad is None for parameter in model.parameters())
    scaler.backward(large_loss(model), retries=20)  # no pass has left a gradient: it is run again
    result = step(scaler, optimizer)
    assert result.retries > 0
    assert not result.skipped()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_runs_the_backward_pass_again_too(copied: Any) -> None:
    model, optimizer, scaler = setup()
    twin = copied(scaler)
    twin.backward(large_loss(model), retries=20)
    assert not step(twin, optimizer).skipped()


def test_a_scale_that_other_code_has_set_is_the_one_that_is_lowered() -> None:
    model, optimizer, scaler = setup(policy=Headroom())
    scaler.backward(large_loss(model) * 1e-6)
    step(scaler, optimizer)
    optimizer.zero_grad()
    scaler.update(2.0**20)
    scaler.backward(large_loss(model), retries=20)
    result = step(scaler, optimizer)
    assert not result.skipped()
    assert result.scale < 2.0**10


def unscaled_before(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> Tensor:
    scaler.scale(large_loss(model) * 1e-6).backward()
    scaler.unscale_(optimizer)
    return large_loss(model)


def reentrant(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> Tensor:
    x = torch.randn(8, 8, requires_grad=True)
    return checkpoint(model, x, use_reentrant=True).sum()  # type: ignore[union-attr, return-value]


OBSTACLES = {
    "`unscale_` before": (unscaled_before, "an optimizer was unscaled or stepped since the last `update`"),
    "reentrant checkpointing": (reentrant, "reentrant checkpointing hides which gradients"),
}


@pytest.mark.parametrize(("make", "text"), OBSTACLES.values(), ids=OBSTACLES)
def test_a_retry_that_cannot_be_right_is_refused(make: Any, text: str) -> None:
    model, optimizer, scaler = setup(policy="auto")
    loss = make(model, optimizer, scaler)
    with pytest.raises(RuntimeError, match=f"`retries` cannot run this backward pass again: .*{text}"):
        scaler.backward(loss, retries=1)
    scaler.backward(loss)


def test_losses_of_the_next_step_are_known_again() -> None:
    model, optimizer, scaler = setup()
    scaler.scale(large_loss(model) * 1e-6).backward()
    step(scaler, optimizer)
    optimizer.zero_grad()
    scaler.backward(large_loss(model), retries=20)
    assert not step(scaler, optimizer).skipped()


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    end_process_group()


@pytest.mark.cpu_only("gloo, which has no other device")
@pytest.mark.usefixtures("process_group")
def test_with_torch_distributed_a_retry_is_refused_unless_the_process_is_alone() -> None:
    model, optimizer, scaler = setup()
    with pytest.raises(RuntimeError, match=r"under DDP or FSDP sends its gradients.*`GradScaler\(group='alone'\)`"):
        scaler.backward(large_loss(model), retries=1)
    model, optimizer, alone = setup(group="alone")
    alone.backward(large_loss(model), retries=20)
    assert not step(alone, optimizer).skipped()
