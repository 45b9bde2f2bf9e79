"""`calibrate`: the best static scale of a model, measured in float32 on any machine."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.formats import FP16, Format, get_format
from gradscale.histogram.calibration import Calibration, add_batch, calibration_of
from gradscale.histogram.counts import ExponentHistogram
from gradscale.torch.probing.run import check_loss, keep_buffers
from gradscale.torch.watch.recorder import Recorder
from gradscale.watching.rows import Kind

SUFFIXES: dict[Kind, str] = {"output_grad": " (output)", "weight_grad": ""}
"""What is measured, and how its kind is written after its name."""


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    format: Format | str = FP16,
    *,
    margin_bits: float = 2,
    optimizer: torch.optim.Optimizer | None = None,
    tick: Callable[[], object] = lambda: None,
) -> Calibration:
    """Returns the best static scale for a model, what is lost at others, and the layers that no single scale serves.

    Runs forward and backward in float32 on every batch, and counts the gradients of parameters and of the outputs of
    modules: both pass through the format. What functions between modules pass on is not seen. `torch.autocast` does
    nothing meanwhile, also inside of `loss_fn`.

    Args:
        model: a float32 model. Its gradients, and without an optimizer its buffers, are left as they were.
        batches: as many as it takes to see what gradients there are: some dozens.
        loss_fn: takes the model and a batch, and returns the loss.
        format: the format that gradients are to be computed in.
        margin_bits: how many times the gradients may double before they overflow.
        optimizer: steps after every batch, so that the beginning of the run is measured and not the initial weights
            alone. The model is trained then.
        tick: called after every batch.

    Raises:
        TypeError: `model` is no module, or `loss_fn` returns no loss.
        ValueError: there are no batches or parameters to train, a parameter is narrower than float32, gradients are all
            zero, or one is inf or NaN: before the optimizer has stepped.
    """
    limits = get_format(format)
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a module. Received: {type(model).__name__}.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("`calibrate` needs parameters that require gradients. Received: a model without one.")
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype.itemsize < 4:
            raise ValueError(
                "`calibrate` measures in float32, where no gradient is lost. "
                f"Received: {name} of {parameter.dtype}. Pass `model.float()`."
            )
    found: dict[str, ExponentHistogram] = {}
    with ExitStack() as blocks:
        for parameter in model.parameters():
            blocks.callback(setattr, parameter, "grad", parameter.grad)
        if optimizer is None:
            keep_buffers([model], blocks)
        for index, batch in enumerate(batches):
            model.zero_grad()
            recorder = Recorder(model, "", lambda: 1.0, SUFFIXES)
            try:
                with no_autocast(next(model.parameters()).device.type):
                    check_loss(loss_fn(model, batch), "loss_fn").backward()
            finally:
                sample = recorder.detach()
            counted = {f"{name}{SUFFIXES[kind]}": tally.histogram for (name, kind), tally in sample.items()}
            add_batch(found, counted, index)
            if optimizer is not None:
                optimizer.step()
            tick()
    if not found:
        raise ValueError("`calibrate` needs batches whose loss reaches parameters that require gradients.")
    return calibration_of(found, limits, margin_bits)


@contextmanager
def no_autocast(device: str) -> Iterator[None]:
    """Disables `torch.autocast`, and makes blocks of it that are entered inside do nothing."""
    autocast: Any = torch.autocast
    enter = autocast.__enter__

    def entered(block: Any) -> Any:
        result = enter(block)
        torch.set_autocast_enabled(block.device, False)
        return result

    autocast.__enter__ = entered
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        autocast.__enter__ = enter
