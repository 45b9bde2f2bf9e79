"""What `LossScaler` refuses, and how it says so."""

import math
import warnings
from collections.abc import Sequence

import torch

from gradscale.torch.apply import takes_gate
from gradscale.torch.gradients import Gradient, named_parameters
from gradscale.torch.window import Window

Optimizer = torch.optim.Optimizer


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Raises unless these are optimizers, each once, that `step` can drive."""
    if not optimizers:
        raise TypeError("`step` takes at least one optimizer. Received: none.")
    for optimizer in optimizers:
        if not (hasattr(optimizer, "param_groups") and callable(getattr(optimizer, "step", None))):
            raise TypeError(f"`step` takes optimizers. Received: {type(optimizer).__name__}.")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "LBFGS evaluates the loss itself. Call `optimizer.step(scaler.closure(loss_function, optimizer))`."
            )
    if len({id(optimizer) for optimizer in optimizers}) != len(optimizers):
        raise ValueError("`step` takes each optimizer once. Received the same one twice.")


def check_clip(name: str, bound: float | None) -> None:
    """Raises unless `bound` is None or a positive number."""
    if bound is None:
        return
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        raise TypeError(f"`{name}` must be a number. Received: {name}={bound!r} ({type(bound).__name__}).")
    if not bound > 0 or math.isnan(bound):
        raise ValueError(f"`{name}` must be greater than 0. Received: {name}={bound!r}. For no clipping pass None.")


def check_order(window: Window | None) -> Window:
    """Returns the window, or says which call is missing before `step`."""
    if window is None:
        raise RuntimeError(
            "`step` needs gradients of a scaled loss, and none was scaled since the last step. "
            "Call `scaler.backward(loss)`, or `scaler.scale(loss).backward()`, before every `scaler.step(...)`."
        )
    if not window.backward_begun:
        raise RuntimeError(
            "`step` needs gradients, and no backward pass has been run since the loss was scaled. "
            "Call `scaler.backward(loss)`, or `.backward()` on what `scaler.scale(loss)` returned."
        )
    return window


def refuse_leftovers(window: Window, optimizers: Sequence[Optimizer], names: dict[int, str]) -> None:
    """Raises if an optimizer's gradients from before this window were never cleared: their scale is not this one's."""
    stale = [optimizer for optimizer in optimizers if id(optimizer) in window.leftovers]
    if stale:
        found = [name for name, parameter in named_parameters(stale, names) if parameter.grad is not None]
        raise RuntimeError(
            "Gradients from before the last step are still there, and this backward pass was added to them. "
            f"Parameters: {_some(found)}. Call `optimizer.zero_grad()` after every step, skipped ones too."
        )


def refuse_shared(optimizers: Sequence[Optimizer], names: dict[int, str]) -> None:
    """Raises if two fused optimizers hold the same parameter: each kernel would divide its gradient."""
    owners: dict[int, str] = {}
    for optimizer in optimizers:
        if not takes_gate(optimizer):
            continue
        mine = {id(parameter): name for name, parameter in named_parameters([optimizer], names)}
        if shared := [name for key, name in mine.items() if key in owners]:
            raise RuntimeError(
                "A parameter may belong to one fused optimizer only: each divides the gradient in its kernel. "
                f"Shared: {_some(shared)}. Build one of the two with `fused=False`."
            )
        owners |= mine


def warn_of_half(gradients: Sequence[Gradient]) -> bool:
    """Warns of FP16 parameters, which lose updates smaller than half a unit in their last place; returns whether."""
    half = [gradient.name for gradient in gradients if gradient.parameter.dtype == torch.float16]
    if half:
        warnings.warn(
            f"These parameters are FP16: {_some(half)}. Unscaled gradients and updates too small for FP16 are lost "
            "there. Keep the parameters in float32 under `torch.autocast`, or keep float32 master weights.",
            stacklevel=3,
        )
    return bool(half)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
