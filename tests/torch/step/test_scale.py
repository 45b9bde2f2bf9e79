"""`LossScaler.scale`: what it multiplies, its errors, and how long the scale stays the same."""

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from tests.torch.helpers import INF, loss_of, small_model
from torch import Tensor, nn

from gradscale import Dynamic, NoScaling, Static
from gradscale.torch import LossScaler

Losses = namedtuple("Losses", "main aux")


def static(scale: float = 1024.0) -> LossScaler:
    return LossScaler(policy=Static(scale))


def test_a_loss_is_multiplied_by_the_scale() -> None:
    assert static().scale(torch.tensor(0.5)).item() == 512.0


def test_losses_in_nested_containers_are_scaled_where_they_are() -> None:
    one = torch.tensor(1.0)
    scaled = static(2.0).scale({"a": [one, (one, Losses(one, one))], "b": OrderedDict(c=one)})
    assert scaled["a"][0].item() == 2.0
    assert scaled["a"][1][1] == Losses(2.0, 2.0)
    assert isinstance(scaled["a"][1][1], Losses)
    assert isinstance(scaled["b"], OrderedDict)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (2, 2)])
def test_a_narrow_loss_is_widened_before_it_overflows(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    scaled = static(65536.0).scale(torch.full(shape, 3.0, dtype=dtype))
    assert scaled.dtype == torch.float32
    assert (scaled == 3 * 65536.0).all()


def test_a_double_loss_keeps_its_digits() -> None:
    scaled = static(2.0).scale(torch.tensor(1 + 2.0**-40, dtype=torch.float64))
    assert scaled.dtype == torch.float64
    assert scaled.item() == 2 + 2.0**-39


def test_a_scaled_loss_that_overflows_still_has_finite_gradients() -> None:
    leaf = torch.tensor(1e30, requires_grad=True)
    scaler = LossScaler(policy=Static(2.0**60))
    scaler.scale(leaf * 1.0).backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == 2.0**60


@pytest.mark.parametrize(
    ("outputs", "kind"),
    [(0.5, "float"), (torch.tensor(3), "a tensor of torch.int64"), ([torch.tensor(1.0), None], "NoneType")],
)
def test_what_is_no_loss_is_refused(outputs: object, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"`scale` takes a loss.* Received: {kind}\. Pass the loss itself"):
        static().scale(outputs)


def test_every_loss_until_the_step_has_the_same_scale() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler(model, Dynamic(init_scale=256.0, growth_interval=1))
    for expected in (256.0, 512.0, 1024.0):
        scales = []
        for micro_batch in range(3):
            loss = loss_of(model, micro_batch)
            scaled = scaler.scale(loss)
            scales.append(scaled.item() / loss.item())
            scaled.backward()
        assert scales == pytest.approx([expected] * 3, rel=1e-6)
        scaler.step(optimizer)
        optimizer.zero_grad()


def late_run(late: bool) -> Tensor:
    """Trains two weights with a loss each, the second of which is scaled early or only when it is needed."""
    a, b = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(1.0))
    first, second = torch.optim.SGD([a], lr=0.1), torch.optim.SGD([b], lr=0.1)
    scaler = LossScaler(policy=Dynamic(init_scale=256.0, growth_interval=1))
    scaled = scaler.scale(3 * a)
    loss = 5 * b
    early = scaler.scale(loss) if late else None
    scaled.backward()
    scaler.step(first)
    (scaler.scale(loss) if early is None else early).backward()
    result = scaler.step(second)
    assert result.scale.item() == 512.0
    return b.detach()


def test_a_loss_whose_backward_pass_comes_after_the_step_gets_the_scale_of_the_next() -> None:
    assert torch.equal(late_run(late=True), late_run(late=False))


def test_a_late_loss_that_is_not_finite_is_still_known_at_its_step() -> None:
    a, b = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(1.0))
    scaler = LossScaler(policy=Static(2.0))
    early = scaler.scale(b * INF)
    scaler.backward(a * 1.0)
    scaler.step(torch.optim.SGD([a]))
    scaler.backward(a * 1.0)
    early.backward()
    assert scaler.step(torch.optim.SGD([b])).status() == "nonfinite_loss"


def test_scaling_makes_no_gradient_where_there_was_none() -> None:
    with torch.no_grad():
        assert not static().scale(loss_of(small_model())).requires_grad


def test_without_scaling_the_loss_is_returned_as_it_is() -> None:
    loss = torch.tensor(1.0, dtype=torch.float16)
    assert LossScaler(policy=NoScaling()).scale(loss) is loss


def test_the_scale_for_losses_of_other_code_is_the_one_that_scale_uses() -> None:
    scaler = LossScaler(policy=Static(1024.0))
    assert scaler.loss_scale.item() == 1024.0
    assert scaler.scale(torch.ones(())).item() == scaler.loss_scale.item()


def test_backward_passes_its_arguments_on() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = torch.tensor(1.0, requires_grad=True)
    scaler = static(2.0)
    loss = x * y
    scaler.backward(loss, gradient=torch.tensor([1.0, 10.0]), inputs=[x], retain_graph=True)
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 20.0]
    assert y.grad is None
    scaler.backward(loss, gradient=torch.tensor([1.0, 10.0]))
    assert y.grad is not None
    assert y.grad.item() == 42.0


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_a_loss_inside_a_torch_func_transform_raises_and_the_loop_can_continue(transform: Any) -> None:
    owner = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([owner], lr=1.0)
    scaler = LossScaler(policy=Static(8.0))
    with pytest.raises(RuntimeError, match=r"inside a `torch\.func` transform.*scaler\.loss_scale"):
        transform(lambda row: scaler.scale(row.sum()))(torch.ones(2))
    scaler.backward(owner.sum())
    assert not scaler.step(optimizer).skipped()
