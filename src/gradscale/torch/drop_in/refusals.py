"""What `GradScaler` refuses: calls in the wrong order, and gradients that would be divided twice, never or in FP16."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale._text import short
from gradscale.engine.hints import ANSWERS, OTHER_ARGUMENTS
from gradscale.torch.checks import some
from gradscale.torch.gradients import Names, parameters_of
from gradscale.torch.window.autograd import has_hidden_leaves

Optimizer = torch.optim.Optimizer

PASSES_ITSELF = (
    "GradScaler is going to stop passing itself as a keyword argument to the passed "
    "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
    "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly."
)
"""torch's own warning."""

LEFT_OUT = "Where a step is left out after `unscale_`, call `update()` in its place."
"""What to do for a loop that looks at unscaled gradients, and does not step on them."""


def second_unscale(stage: OptState) -> RuntimeError:
    """Returns torch's error for an optimizer whose gradients are divided already, or that was stepped."""
    if stage is OptState.STEPPED:
        return RuntimeError("unscale_() is being called after step().")
    error = RuntimeError("unscale_() has already been called on this optimizer since the last update().")
    error.add_note(LEFT_OUT)
    return error


def refuse_arguments(optimizer: Optimizer, given: Mapping[str, Any], *args: Any) -> None:
    """Raises for arguments of `step` with a closure, or with another scaler's name for `clip_norm` or `clip_value`.

    Not for a name that the optimizer's own `step` takes.
    """
    if "closure" in given or (args and callable(args[0])):
        raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
    if not (asked := [name for name in given if name in OTHER_ARGUMENTS]):
        return
    takes = inspect.signature(optimizer.step).parameters
    if asked[0] not in takes and not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values()):
        raise TypeError(
            "`scaler.step` passes keywords on to the `step` of the optimizer, which has no argument "
            f"{asked[0]!r}. Received: {asked[0]}={short(given[asked[0]])}. {ANSWERS['torch drop-in']['clip']}"
        )


def clip_of(optimizer: Optimizer) -> TypeError:
    """Returns the error for a bound that `step` is given for an optimizer that unscales the gradients itself."""
    return TypeError(
        "`clip_norm` and `clip_value` need an optimizer whose gradients the scaler unscales. Received: "
        f"{type(optimizer).__name__}, whose `step` takes a `grad_scaler` and does all of it itself. "
        "Call `scaler.unscale_(optimizer)`, then `torch.nn.utils.clip_grad_norm_`."
    )


def half_gradients(optimizer: Optimizer) -> ValueError:
    """Returns torch's error for FP16 gradients outside of a fused kernel, with a note that names the parameters."""
    half = [each for each in parameters_of([optimizer]) if getattr(each.grad, "dtype", None) is torch.float16]
    error = ValueError("Attempting to unscale FP16 gradients.")
    error.add_note(
        f"FP16 parameters: {some(Names(()), half, [optimizer])}. "
        "Keep parameters in float32 and compute under `torch.autocast`; or wrap the optimizer, as "
        "`gradscale.torch.MasterWeights(optimizer, grad_fp32=True)`, for float32 gradients."
    )
    return error


def refuse_divided(optimizer: Optimizer, others: Iterable[Optimizer]) -> None:
    """Raises if one of `others`, which have divided their gradients, holds some of the same."""
    # torch's scaler divides such a gradient once for each optimizer: the update is too small by a factor of the scale.
    for other in others:
        if other is optimizer:
            continue
        theirs = {id(parameter.grad) for parameter in with_gradients(other)}  # two parameters may hold one gradient
        if shared := [parameter for parameter in parameters_of([optimizer]) if id(parameter.grad) in theirs]:
            raise RuntimeError(
                "A parameter may belong to one optimizer of a backward pass only: each divides its gradient by the "
                f"scale. Shared with another {type(other).__name__}: {some(Names(()), shared, [optimizer])}. Take them "
                "out of one of the two, or give both to one `gradscale.torch.LossScaler.step`, which divides once."
            )


def refuse_scaled(optimizer: Optimizer, unscaled: int) -> None:
    """Raises if groups after the first `unscaled` ones have gradients: they are newer than `unscale_`."""
    # torch's scaler applies them as they are: the update is too large by a factor of the scale.
    added = [parameter for group in optimizer.param_groups[unscaled:] for parameter in group["params"]]
    late = [parameter for parameter in added if parameter.grad is not None]
    if late and unscaled:
        raise RuntimeError(
            "A parameter group was added after `unscale_`, and its gradients are still scaled: "
            f"{some(Names(()), late, [optimizer])}. Add groups before `unscale_` or after `step`."
        )
    if late:
        raise RuntimeError(
            "The gradients of this optimizer were cleared after `unscale_`, and made anew by another backward pass: "
            f"they are still scaled. {LEFT_OUT}"
        )


def unchecked_gradients(optimizer: Optimizer) -> AssertionError:
    """Returns torch's error for an optimizer without checked gradients, with a note on the likely cause."""
    error = AssertionError("No inf checks were recorded for this optimizer.")
    if with_gradients(optimizer):
        error.add_note("Its gradients were made after `unscale_`. Call `unscale_` after the backward pass.")
        return error
    error.add_note(
        f"None of the {len(parameters_of([optimizer]))} parameters of this {type(optimizer).__name__} "
        "has a gradient: frozen, unused by the loss, or not the model's (was the model moved or wrapped afterwards?)."
    )
    return error


def with_gradients(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters of an optimizer that have a gradient."""
    return [parameter for parameter in parameters_of([optimizer]) if parameter.grad is not None]


def refuse_retries(loss: Tensor, states: Mapping[int, Mapping[str, Any]], group: Any) -> None:
    """Raises if the backward pass of `loss` cannot be run again, or not safely in `states` of the optimizers."""
    reason = None
    if dist.is_available() and dist.is_initialized() and group != "alone":
        reason = (
            "a backward pass under DDP or FSDP sends its gradients to other ranks, once for each forward pass, and a "
            "GradScaler does not know whether the model does so. Use `gradscale.torch.LossScaler(model)`, which does; "
            "or, where this process trains a model by itself, `GradScaler(group='alone')`."
        )
    elif any(state["stage"] is not OptState.READY for state in states.values()):
        reason = (
            "an optimizer was unscaled or stepped since the last `update`, with the scale that a retry would change. "
            "Call `backward` before `unscale_` and `step`, or after `update`."
        )
    elif has_hidden_leaves(loss):
        reason = (
            "reentrant checkpointing hides which gradients the backward pass makes. Use "
            "`checkpoint(..., use_reentrant=False)`, or `gradscale.torch.LossScaler(model)`."
        )
    if reason is not None:
        raise RuntimeError(f"`retries` cannot run this backward pass again: {reason}")


def not_capturable() -> RuntimeError:
    """Returns the error for steps that `update` cannot make one of without the host."""
    return RuntimeError(
        "With `capturable=True` the device decides by itself: each optimizer is checked once, by `step` or `unscale_`, "
        "and one `update` follows, on flags that no other code has made or reduced. Clip by `step(optimizer, "
        "clip_norm=...)`, or by `clip_grad_norm_` after `unscale_`. Leave out `capturable` otherwise."
    )
