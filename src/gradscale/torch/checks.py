"""Checks of the arguments of `LossScaler` and of the order of its calls."""

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradscale._shown import short
from gradscale.engine.decide import check_clip
from gradscale.engine.stuck import callers_level
from gradscale.torch.compat import grad_dtype, grad_fp32_needs
from gradscale.torch.fused_sgd import refuse_broken_fused_sgd
from gradscale.torch.step.gradients import Gradients, Names, keeps_masters, parameters_of

if TYPE_CHECKING:
    from gradscale.torch.accumulation.window import Window

Optimizer = torch.optim.Optimizer


def check_modules(model: Any) -> list[nn.Module]:
    """Returns the modules that `model` stands for: itself, several or none."""
    found: list[Any] = [] if model is None else [model]
    if isinstance(model, Iterable) and not isinstance(model, nn.Module):
        found = list(model)
    if not all(isinstance(module, nn.Module) for module in found):
        long = isinstance(model, Optimizer | Tensor) or _has_tensors(found)
        received = type(model).__name__ if long else short(model)
        instead = "Give the module itself, not its parameters." if _has_tensors(found) else _instead_of(model)
        raise TypeError(f"`model` must be a module or a list of modules. Received: {received}. {instead}")
    return found


def _instead_of(model: Any) -> str:
    """Returns where to give what was given as the model."""
    if isinstance(model, Optimizer):
        return "`scaler.step(optimizer)` takes the optimizer; build the scaler as `LossScaler(model)`."
    if isinstance(model, int | float):
        return f"Give a first scale as `LossScaler(model, policy=Dynamic(init_scale={model!r}))`."
    if isinstance(model, str | torch.device) and _is_device(model):
        return f"Give a device by name, as `LossScaler(model, device={str(model)!r})`, or leave it out."
    if isinstance(model, type):
        return "This is a class: give a module that was made of it."
    return "Pass a policy as `policy=...`."


def _has_tensors(found: Sequence[Any]) -> bool:
    return any(isinstance(one, Tensor) for one in found)


def _is_device(given: Any) -> bool:
    try:
        torch.device(given)
    except RuntimeError:
        return False
    return True


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Raises unless these are optimizers, each once, that `step` can drive."""
    if not optimizers:
        raise TypeError("`step` takes at least one optimizer. Received: none.")
    for optimizer in optimizers:
        if not (hasattr(optimizer, "param_groups") and callable(getattr(optimizer, "step", None))):
            raise TypeError(
                f"`step` takes optimizers. Received: {type(optimizer).__name__}. Pass several as `step(a, b)`; for one "
                "that takes a closure call `optimizer.step(scaler.closure(loss_function, optimizer))`."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "LBFGS evaluates the loss itself. Call `optimizer.step(scaler.closure(loss_function, optimizer))`."
            )
    if len({id(optimizer) for optimizer in optimizers}) != len(optimizers):
        raise ValueError("`step` takes each optimizer once. Received the same one twice.")


def check_step(optimizers: Sequence[Optimizer], clip_norm: float | None, clip_value: float | None) -> None:
    """Raises unless a step can be made with these arguments."""
    check_optimizers(optimizers)
    check_clip("clip_norm", clip_norm)
    check_clip("clip_value", clip_value)
    refuse_broken_fused_sgd(optimizers)


def check_order(window: "Window | None") -> "Window":
    """Returns the window, or raises an error that names the call that is missing before `step`."""
    if window is None:
        raise RuntimeError(
            "`step` needs gradients of a scaled loss, and none was scaled since the last step. "
            "Call `scaler.backward(loss)`, or `scaler.scale(loss).backward()`, before every `scaler.step(...)`; "
            "optimizers that share a backward pass go into one call, `scaler.step(a, b)`."
        )
    if not window.backward_begun:
        raise RuntimeError(
            "`step` needs gradients, and no backward pass has been run since the loss was scaled. "
            "Call `scaler.backward(loss)`, or `.backward()` on what `scaler.scale(loss)` returned."
        )
    return window


def refuse_stale(window: "Window", optimizers: Sequence[Optimizer], names: Names) -> None:
    """Raises if gradients from before this window were not cleared: they have another scale."""
    if not window.stale:
        return
    stale = {id(parameter) for parameter in window.stale if parameter.grad is not None}
    if found := [parameter for parameter in parameters_of(optimizers) if id(parameter) in stale]:
        raise RuntimeError(
            "Gradients from before the last step are still there, and this backward pass was added to them. "
            f"Parameters: {some(names, found, optimizers)}. Call `optimizer.zero_grad()` after every step, "
            "skipped ones too."
        )


def refuse_unknown_parameters(window: "Window", optimizers: Sequence[Optimizer], names: Names) -> None:
    """Raises if a backward pass was run again and may have left a gradient at the scale of its first attempt."""
    if window.rescaled is None:
        return
    held = [parameter for parameter in parameters_of(optimizers) if parameter.grad is not None]
    if unknown := [parameter for parameter in held if id(parameter) not in window.rescaled]:
        raise RuntimeError(
            "`retries` ran a backward pass again that also made gradients of parameters the scaler does not know: "
            f"{some(names, unknown, optimizers)}. Build it as `LossScaler([model, other])`, and clear these "
            "gradients."
        )


def refuse_unnamed(window: "Window", scaled: Gradients) -> None:
    """Raises if an optimizer that `unscaled` did not name holds some of `scaled`, the gradients not yet divided."""
    if scaled.owned_by([each for each in scaled.optimizers if id(each) not in window.unscaled.optimizers]):
        raise RuntimeError(
            "`step` needs all its optimizers inside the same `unscaled(...)` block, or none of them. "
            "Name every optimizer of the step there."
        )


def refuse_narrow(call: str, optimizers: Sequence[Optimizer], names: Names) -> None:
    """Raises if `call` would unscale, in FP16, gradients that an optimizer with masters would divide in float32."""
    masters = [optimizer for optimizer in optimizers if keeps_masters(optimizer)]
    # A frozen parameter has no gradient to lose.
    trained = [each for each in parameters_of(masters) if each.requires_grad or each.grad is not None]
    half = [parameter for parameter in trained if _grad_dtype(parameter) is torch.float16]
    if half:
        raise TypeError(
            f"{call} unscales `.grad` in place, and FP16 cannot hold small unscaled gradients. "
            f"Parameters with FP16 gradients: {some(names, half, masters)}. "
            f"Build the optimizer as `MasterWeights(optimizer, grad_fp32=True)`{grad_fp32_needs()}."
        )


def _grad_dtype(parameter: Tensor) -> torch.dtype:
    """Returns the type of the parameter's gradient, or of the one that a backward pass would make."""
    return grad_dtype(parameter) if parameter.grad is None else parameter.grad.dtype


def warn_of_half(gradients: Gradients, names: Names) -> bool:
    """Warns of FP16 parameters without masters, which lose small updates; returns whether there are any."""
    safe = {id(parameter) for parameter in parameters_of(filter(keeps_masters, gradients.optimizers))}
    half = [each for each in gradients.parameters if each.dtype is torch.float16 and id(each) not in safe]
    if half:
        warnings.warn(
            f"These parameters are FP16: {some(names, half, gradients.optimizers)}. Unscaled gradients and updates too "
            "small for FP16 are lost there. Keep the parameters in float32 under `torch.autocast`, or wrap their "
            "optimizer in `gradscale.torch.MasterWeights`.",
            stacklevel=callers_level(),
        )
    return bool(half)


def some(names: Names, found: Sequence[Tensor], optimizers: Iterable[Optimizer]) -> str:
    """Returns the names of at most five parameters of `optimizers`, and how many more there are."""
    shown = ", ".join(names.of(found[:5], optimizers))
    return shown + (f" and {len(found) - 5} more" if len(found) > 5 else "")
