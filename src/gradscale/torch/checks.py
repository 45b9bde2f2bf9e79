"""Checks of the arguments of `LossScaler` and of the order of its calls."""

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradscale._text import short
from gradscale.engine.decide import check_clip
from gradscale.engine.health import callers_level
from gradscale.torch.compat import grad_dtype, grad_fp32_needs
from gradscale.torch.fused_sgd import refuse_broken_fused_sgd
from gradscale.torch.gradients import Gradients, Names, keeps_masters, parameters_of

if TYPE_CHECKING:
    from gradscale.torch.window.unscaled import Unscaled
    from gradscale.torch.window.window import Held, Window

Optimizer = torch.optim.Optimizer


INSTEAD: tuple[tuple[Any, str], ...] = (
    (Optimizer, "`scaler.step(optimizer)` takes the optimizer; build the scaler as `LossScaler(model)`."),
    (int | float, "Give a first scale as `LossScaler(model, policy=Dynamic(init_scale={}))`."),
    (torch.device, "Give a device by name, as `LossScaler(model, device='{}')`, or leave it out."),
    (type, "This is a class: give a module that was made of it."),
    (object, "Pass a policy as `policy=...`."),
)
"""Where to give what was given as the model, by its type."""


def check_modules(model: Any) -> list[nn.Module]:
    """Returns the modules that `model` stands for: itself, several or none."""
    found: list[Any] = [] if model is None else [model]
    if isinstance(model, Iterable) and not isinstance(model, nn.Module):
        found = list(model)
    if not all(isinstance(module, nn.Module) for module in found):
        tensors = any(isinstance(each, Tensor) for each in found)
        received = type(model).__name__ if tensors or isinstance(model, Optimizer) else short(model)
        given = model
        if isinstance(model, str) and model.partition(":")[0] in ("cpu", "cuda", "mps", "xpu"):
            given = torch.device(model)
        instead = next(text for types, text in INSTEAD if isinstance(given, types)).format(given)
        instead = "Give the module itself, not its parameters." if tensors else instead
        raise TypeError(f"`model` must be a module or a list of modules. Received: {received}. {instead}")
    return found


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


def out_of_order(window: "Window | None") -> RuntimeError:
    """Returns the error that names the call that is missing before `step`."""
    if window is None:
        return RuntimeError(
            "`step` needs gradients of a scaled loss, and none was scaled since the last step. Call "
            "`scaler.backward(loss)`, or `scaler.scale(loss).backward()`, before every `scaler.step(...)`; optimizers "
            "that share a backward pass go into one call, `scaler.step(a, b)`, those of `step_in_backward` into none."
        )
    return RuntimeError(
        "`step` needs gradients, and no backward pass has been run since the loss was scaled. "
        "Call `scaler.backward(loss)`, or `.backward()` on what `scaler.scale(loss)` returned."
    )


def refuse_stale(left: Iterable["Held"], optimizers: Sequence[Optimizer], names: Names) -> None:
    """Raises if gradients that are `left` from before this window, of another scale, are stepped: edited or not."""
    stale = {id(each.parameter): each for each in left}
    if found := [p for p in parameters_of(optimizers) if id(p) in stale and stale[id(p)].uncleared]:
        raise RuntimeError(
            "Gradients from before the last step are still there, and this backward pass was added to them. "
            f"Parameters: {some(names, found, optimizers)}. Call `optimizer.zero_grad()` after every step, "
            "skipped ones too."
        )


def refuse_stepped_in_backward(optimizers: Sequence[Optimizer], names: Names) -> None:
    """Raises if there is no gradient left because hooks of the parameters have used them during the backward pass."""
    hooked = [each for each in parameters_of(optimizers) if getattr(each, "_post_accumulate_grad_hooks", None)]
    if hooked:
        raise RuntimeError(
            "`step` needs gradients, and a backward pass was run that has left none. These parameters have hooks that "
            f"are called when a gradient is accumulated: {some(names, hooked, optimizers)}. A hook that steps uses "
            "gradients that are scaled and not checked. Remove it, and call `scaler.step_in_backward(optimizer)` once."
        )


def refuse_unnamed(unscaled: "Unscaled", scaled: Gradients) -> None:
    """Raises if an optimizer that `unscaled` did not name holds some of `scaled`, the gradients not yet divided."""
    if scaled.owned_by([each for each in scaled.optimizers if id(each) not in unscaled.optimizers]):
        raise RuntimeError(
            "`step` needs all its optimizers inside the same `unscaled(...)` block, or none of them. "
            "Name every optimizer of the step there."
        )


def refuse_narrow(call: str, optimizers: Sequence[Optimizer], names: Names) -> None:
    """Raises if `call` would unscale, in FP16, gradients that an optimizer with masters would divide in float32."""
    masters = [optimizer for optimizer in optimizers if keeps_masters(optimizer)]
    # A frozen parameter has no gradient to lose.
    trained = [each for each in parameters_of(masters) if each.requires_grad or each.grad is not None]
    # The type of the gradient, or of the one that a backward pass would make.
    half = [p for p in trained if (grad_dtype(p) if p.grad is None else p.grad.dtype) is torch.float16]
    if half:
        raise TypeError(
            f"{call} unscales `.grad` in place, and FP16 cannot hold small unscaled gradients. "
            f"Parameters with FP16 gradients: {some(names, half, masters)}. "
            f"Build the optimizer as `MasterWeights(optimizer, grad_fp32=True)`{grad_fp32_needs()}."
        )


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
