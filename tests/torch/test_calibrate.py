"""`calibrate`: what it measures, and that it leaves the model as it was."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscale.histogram import best_static_scale, exponent_histogram
from gradscale.torch import calibrate


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 3, generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_gradients_of_parameters_and_of_outputs_are_measured() -> None:
    found = calibrate(model_of(), batches(), loss_of)
    names = {layer.name for layer in found.layers}
    assert {"0.weight", "0.bias", "3.weight", "0 (output)", "2 (output)", "(model) (output)"} <= names


def test_the_scale_fits_the_largest_gradient_of_all_batches() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    found = calibrate(model, [batch * 2.0**index for index, batch in enumerate(batches())], loss_of, margin_bits=1)
    grads: list[Any] = []
    for index, batch in enumerate(batches()):
        output = model(batch * 2.0**index)
        loss = output.square().mean()
        grads += [grad.cpu().numpy() for grad in torch.autograd.grad(loss, [*model.parameters(), output])]
    assert found.scale == best_static_scale(exponent_histogram(grads), margin_bits=1)


def test_the_model_is_left_as_it_was() -> None:
    model = model_of()
    loss_of(model, batches()[0]).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [parameter.grad for parameter in model.parameters()]
    copies = [None if grad is None else grad.clone() for grad in grads]
    calibrate(model, batches(), loss_of)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for parameter, grad, copy in zip(model.parameters(), grads, copies, strict=True):
        assert parameter.grad is grad
        assert grad is not None
        assert copy is not None
        assert torch.equal(grad, copy)
    assert all(not module._forward_hooks for module in model.modules())


def test_an_optimizer_trains_the_model_between_batches() -> None:
    model = model_of()
    before = next(model.parameters()).detach().clone()
    calibrate(model, batches(), loss_of, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert not torch.equal(next(model.parameters()), before)


@pytest.mark.not_simulated("autocast of the CPU, which its kernels run in")
def test_autocast_around_it_does_not_narrow_the_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    tiny = [batch * 1e-7 for batch in batches()]
    with torch.autocast("cpu", dtype=torch.float16):
        inside = calibrate(model, tiny, lambda model, batch: model(batch).sum() * 1e-6)
    outside = calibrate(model, tiny, lambda model, batch: model(batch).sum() * 1e-6)
    assert inside.to_dict() == outside.to_dict()


def test_tick_is_called_after_each_batch() -> None:
    ticks: list[int] = []
    calibrate(model_of(), iter(batches(4)), loss_of, tick=lambda: ticks.append(1))
    assert len(ticks) == 4


def test_hooks_are_removed_where_the_loss_raises() -> None:
    model = model_of()
    with pytest.raises(ZeroDivisionError):
        calibrate(model, batches(), lambda model, batch: 1 / 0)  # type: ignore[arg-type]
    assert all(not module._forward_hooks for module in model.modules())


def test_a_half_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"measures in float32.* Received: 0\.weight of torch\.float16"):
        calibrate(model_of().half(), batches(), loss_of)


def test_no_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="needs batches whose loss reaches parameters"):
        calibrate(model_of(), [], loss_of)


def half_loss(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast(batch.device.type, dtype=torch.float16):
        return loss_of(model, batch)


def test_autocast_inside_of_the_loss_does_nothing() -> None:
    model = model_of()
    assert calibrate(model, batches(), half_loss) == calibrate(model, batches(), loss_of)
    with torch.autocast(batches()[0].device.type, dtype=torch.float16):
        assert calibrate(model, batches(), half_loss) == calibrate(model, batches(), loss_of)


def test_gradients_that_fp16_would_lose_are_measured_under_autocast_too() -> None:
    found = calibrate(model_of(), batches(), lambda model, batch: half_loss(model, batch) * 1e-12)
    assert found.scale > 2.0**40


def test_autocast_works_again_afterwards() -> None:
    model = model_of()
    with pytest.raises(RuntimeError, match="no loss"):
        calibrate(model, batches(), _raise)
    calibrate(model, batches(), half_loss)
    with torch.autocast(batches()[0].device.type, dtype=torch.float16):
        assert model[0](batches()[0]).dtype is torch.float16


def _raise(model: nn.Module, batch: Tensor) -> Tensor:
    del model, batch
    raise RuntimeError("no loss")


def test_gradients_that_are_all_zero_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a gradient that is not zero\. Received: \d+ gradients that are all zero"):
        calibrate(model_of(), batches(), lambda model, batch: loss_of(model, batch) * 0.0)


def test_a_batch_with_nan_is_named_before_the_optimizer_has_seen_it() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    good, bad, _ = batches()
    with pytest.raises(ValueError, match=r"inf or NaN in batch 1, counted from 0, in the gradients of .* and \d+ more"):
        calibrate(model, [good, bad * float("nan")], loss_of, optimizer=optimizer)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(3, 2).requires_grad_(False)], ids=["no parameters", "frozen"])
def test_a_model_without_anything_to_train_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="needs parameters that require gradients"):
        calibrate(model, batches(), loss_of)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`model` must be a module\. Received: NoneType"):
        calibrate(None, batches(), loss_of)  # type: ignore[arg-type]


def test_a_loss_that_is_a_plain_number_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`loss_fn` must return the loss.*Received: float\."):
        calibrate(model_of(), batches(), lambda model, batch: loss_of(model, batch).item())  # type: ignore[arg-type,return-value]
