"""The public API on parameters and losses that are DTensors, on two ranks, against the same on one."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from tests.torch.helpers import INF, NAN
from tests.torch.ranks.launch import run_ranks
from tests.torch.ranks.sharded import (
    KINDS,
    assert_same,
    backward_of,
    found_on_ranks,
    full,
    local,
    loss_of,
    model_of,
    on_first_rank,
    poison_one_rank,
    weights_of,
)
from tests.torch.versions import needs_sharding_on_cpu
from tests.torch.window.test_retry import OverflowAbove
from torch import Tensor, nn

from gradscale import Dynamic
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.torch import LossScaler

FSDP = ("fsdp", "hsdp")

Setup = tuple[Any, torch.optim.Optimizer, LossScaler]


def setup(kind: str, policy: Any = None) -> Setup:
    model = model_of(kind)
    # Without a multi-tensor kernel: torch's do not take plain and DTensor parameters together.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return model, optimizer, LossScaler(model, policy or Dynamic(init_scale=1024.0, growth_interval=2))


def with_steps(kind: str) -> Any:
    """Steps with a clip, an overflow on one rank and a loss that is not finite."""
    model, optimizer, scaler = setup(kind)
    found = []
    for step in range(5):
        with backward_of(kind):
            loss = loss_of(model, kind, step)
            scaler.backward(loss * NAN if step == 3 else loss)
        if step == 1:
            poison_one_rank(model[2].weight)
        result = scaler.step(optimizer, clip_norm=0.5)
        found.append((str(result.status()), result.next_scale.item(), result.applied.item() and result.grad_norm))
        optimizer.zero_grad()
    return found, weights_of(model)


def with_a_dict_of_losses(kind: str) -> Any:
    model, optimizer, scaler = setup(kind)
    with backward_of(kind):
        losses = scaler.scale({"a": loss_of(model, kind), "b": [loss_of(model, kind, 1)]})
        (losses["a"] + losses["b"][0]).backward()
    result = scaler.step(optimizer, clip_value=0.01, norm=True)
    return result.grad_norm, weights_of(model)


def with_a_partial_loss(kind: str) -> Any:
    """A loss that is a sum of what the ranks hold: finite on all of them, then not finite on one."""
    model, optimizer, scaler = setup(kind)
    found: list[Any] = []
    for factor in (1.0, NAN):
        scaler.backward(weighted_sum(model[2].weight, factor))
        result = scaler.step(optimizer, norm=True)
        found.append((str(result.status()), result.next_scale.item(), result.applied.item() and result.grad_norm))
        optimizer.zero_grad()
    return found, weights_of(model)


def weighted_sum(weight: Tensor, first: float) -> Tensor:
    """Returns the sum of a weight's elements, of which the very first is multiplied by `first`."""
    factors = torch.ones_like(weight)
    if on_first_rank():
        local(factors)[0, 0] = first
    return (weight * factors).sum()


def with_unscaled(kind: str) -> Any:
    found: list[Any] = []
    for policy in (Headroom(), Histogram()):
        model, optimizer, scaler = setup(kind, policy)
        with backward_of(kind):
            scaler.backward(loss_of(model, kind))
        with scaler.unscaled(optimizer):
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)  # type: ignore[union-attr]
        result = scaler.step(optimizer, clip_norm=0.1)
        found += [str(result.status()), result.grad_norm, result.next_scale, *weights_of(model)]
    return found


def with_backward_after_unscaled(kind: str) -> Any:
    model, optimizer, scaler = setup(kind)
    with backward_of(kind):
        scaler.backward(loss_of(model, kind))
        with scaler.unscaled(optimizer):
            pass
        scaler.backward(loss_of(model, kind))


def with_stale_gradients(kind: str) -> Any:
    model, optimizer, scaler = setup(kind)
    with backward_of(kind):
        scaler.backward(loss_of(model, kind))
        scaler.step(optimizer)
        scaler.backward(loss_of(model, kind))
        scaler.step(optimizer)


def with_a_bad_first_micro_batch(kind: str) -> Any:
    """Of three: kept, cleared, and cleared in place."""
    statuses = []
    for clear in (None, True, False):
        model, optimizer, scaler = setup(kind)
        with backward_of(kind):
            scaler.backward(loss_of(model, kind) * NAN)
            if clear is not None:
                optimizer.zero_grad(set_to_none=clear)
            scaler.backward(loss_of(model, kind))
        statuses.append(str(scaler.step(optimizer).status()))
    return statuses


def with_a_late_backward(kind: str) -> Any:
    """A loss that is scaled before a skipped step, and differentiated after it, at half the scale."""
    model, optimizer, scaler = setup(kind)
    with backward_of(kind):
        late = scaler.scale(loss_of(model, kind, 1))
        scaler.backward(loss_of(model, kind))
        poison_one_rank(model[0].weight)
        skipped = str(scaler.step(optimizer).status())
        optimizer.zero_grad()
        late.backward()
    result = scaler.step(optimizer, norm=True)
    return skipped, str(result.status()), result.scale.item(), result.grad_norm, weights_of(model)


def without_synchronization(kind: str) -> Any:
    """Micro-batches of which FSDP reduces the gradients at the last one alone, at the first step and the next ones."""
    model, optimizer, scaler = setup(kind)
    found: list[Any] = []
    for step, factor in enumerate((1.0, 1.0, NAN)):
        for micro_batch in range(3):
            if kind in FSDP:
                model.set_requires_gradient_sync(micro_batch == 2)
            with backward_of(kind):
                loss = loss_of(model, kind, step + micro_batch)
                scaler.backward(loss * factor if micro_batch == 0 else loss)
        result = scaler.step(optimizer, clip_norm=0.5)
        found.append((str(result.status()), result.next_scale.item(), result.applied.item() and result.grad_norm))
        optimizer.zero_grad()
    return found, weights_of(model)


def with_retries(kind: str) -> Any:
    model, optimizer, scaler = setup(kind, Dynamic(init_scale=65536.0))
    with backward_of(kind):
        scaler.backward(loss_of(model, kind))
        # Only rank 0 overflows: both must try the same scales.
        limit = 1024.0 if on_first_rank() else INF
        scaler.backward(Limited.apply(loss_of(model, kind, 1), limit), retries=10)
    result = scaler.step(optimizer, norm=True)
    return result.retries, result.scale.item(), result.grad_norm, weights_of(model)


class Limited(OverflowAbove):
    """The same, for losses that are DTensors too."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad * (INF if (local(grad).abs() > ctx.limit).any() else 1.0), None


def with_a_closure(kind: str) -> Any:
    model, optimizer, scaler = setup(kind)
    found: list[Any] = []
    for factor in (1.0, NAN):
        with backward_of(kind):
            loss = optimizer.step(scaler.closure(lambda factor=factor: loss_of(model, kind) * factor, optimizer))
        assert scaler.last is not None
        found += [loss is not None, str(scaler.last.status()), scaler.last.applied.item() and scaler.last.grad_norm]
    return found, weights_of(model)


def with_a_penalty(kind: str) -> Any:
    """A penalty on gradients that are finite, then overflow on one rank alone: 1e36 times the scale."""
    model, optimizer, scaler = setup(kind)
    found: list[Any] = []
    for factor in (1.0, 1e36):
        (grad,) = scaler.grad(weighted_sum(model[2].weight.square(), factor), [model[2].weight], create_graph=True)
        scaler.backward(whole(cast(Tensor, grad).square().sum()))
        result = scaler.step(optimizer)
        found.append((str(result.status()), result.next_scale.item(), full(grad) if factor == 1.0 else None))
        optimizer.zero_grad()
    return found


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def with_buffers(kind: str) -> Any:
    model, optimizer, scaler = setup(kind)
    model.register_buffer("count", torch.zeros(3))
    sharded = torch.zeros_like(model[2].weight.detach())
    model.register_buffer("sharded", sharded)
    scaler.protect_buffers()
    schedule = scaler.guard(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    counts = []
    for step in range(2):
        with backward_of(kind):
            loss = loss_of(model, kind)
            model.count.add_(1)  # type: ignore[operator]
            model.sharded.add_(1)  # type: ignore[operator]
            scaler.backward(loss)
        if step == 1:
            poison_one_rank(model[0].weight)
        scaler.step(optimizer)
        optimizer.zero_grad()
        counts += [schedule.step(), full(model.count), full(model.sharded)]
    return counts


def with_state(kind: str) -> Any:
    model, optimizer, scaler = setup(kind)
    found: list[Any] = []
    for set_to_none in (True, False):
        with backward_of(kind):
            scaler.backward(loss_of(model, kind))
        optimizer.zero_grad(set_to_none=set_to_none)
        scaler.load_state_dict(scaler.state_dict())
        with backward_of(kind):
            scaler.backward(loss_of(model, kind))
        found.append(str(scaler.step(optimizer, norm=True).status()))
        optimizer.zero_grad()
        metrics = scaler.metrics()
        found += [metrics["grad_norm"], metrics["scale"], repr(scaler)]
    return found


CASES = {
    case.__name__: case
    for case in (
        with_steps,
        with_a_dict_of_losses,
        with_a_partial_loss,
        with_a_penalty,
        with_unscaled,
        with_backward_after_unscaled,
        with_stale_gradients,
        with_a_bad_first_micro_batch,
        with_a_late_backward,
        without_synchronization,
        with_retries,
        with_a_closure,
        with_buffers,
        with_state,
    )
}
ALLOWED = [
    pytest.param(name, kind, marks=needs_sharding_on_cpu if kind in FSDP else ())
    for name in CASES
    for kind in KINDS
    if name != with_retries.__name__
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found_on_ranks(tmp_path_factory.mktemp("ranks"), CASES)


def one(name: str) -> Any:
    try:
        return CASES[name]("one")
    except RuntimeError as error:
        return f"RuntimeError: {error}"


@pytest.mark.parametrize(("name", "kind"), ALLOWED)
def test_a_case_is_the_same_on_dtensors_as_on_one_rank(name: str, kind: str, found: Any) -> None:
    first, second = (each[name, kind] for each in found)
    assert_same(second, first)
    assert_same(first, one(name), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=needs_sharding_on_cpu if k in FSDP else ()) for k in KINDS])
def test_retries_are_refused(kind: str, found: Any) -> None:
    text = "the backward pass of FSDP" if kind in FSDP else "a backward pass again that may send gradients"
    for each in found:
        assert f"`retries` cannot run {text}" in each[with_retries.__name__, kind]


def whole_gradient_of_shards(bad: bool) -> tuple[str, list[float], list[str]]:
    """Returns status, weights and culprits of a step with a gradient that is whole on each of two ranks.

    If it is `bad`, the second rank has a NaN in the part of its copy that belongs to the first.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    parameter: Any = nn.Parameter(distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (2,)), [Shard(0)]))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.5), LossScaler(policy=Dynamic(init_scale=4.0))
    scaler.backward((parameter * 2).sum().full_tensor())
    if bad and dist.get_rank() == 1:
        parameter.grad.to_local()[0] = torch.nan
    result = scaler.step(optimizer)
    return result.status(), parameter.full_tensor().tolist(), [culprit.kind for culprit in result.culprits()]


def test_a_bad_copy_of_a_whole_gradient_skips_the_step_on_all_ranks(tmp_path: Path) -> None:
    clean, bad = (run_ranks(2, whole_gradient_of_shards, flag, folder=tmp_path / str(flag)) for flag in (False, True))
    assert clean == [("applied", [-1.0] * 4, [])] * 2
    assert bad == [("overflow", [0.0] * 4, ["nan"])] * 2
