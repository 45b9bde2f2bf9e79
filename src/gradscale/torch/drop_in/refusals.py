"""What `GradScaler` refuses: calls in the wrong order, and gradients that would be divided twice, never or in FP16."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale._shown import short
from gradscale.engine.other_arguments import OTHER_ARGUMENTS
from gradscale.engine.other_names import ANSWERS
from gradscale.torch.checks import some
from gradscale.torch.drop_in.unscale import gradients_of
from gradscale.torch.step.gradients import Names, parameters_of

Optimizer = torch.optim.Optimizer

CLIPS = frozenset(OTHER_ARGUMENTS)
"""Other scalers' names for `clip_norm` and `clip_value`."""


LEFT_OUT = "Where a step is left out after `unscale_`, call `update()` in its place."
"""What to do for a loop that looks at unscaled gradients, and does not step on them."""


def refuse_second_unscale(stage: OptState) -> None:
    """Raises torch's error for an optimizer whose gradients are divided already, or that was stepped."""
    if stage is OptState.UNSCALED:
        error = RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        error.add_note(LEFT_OUT)
        raise error
    if stage is OptState.STEPPED:
        raise RuntimeError("unscale_() is being called after step().")


def refuse_second_step(stage: OptState) -> None:
    """Raises torch's error for an optimizer that was stepped already."""
    if stage is OptState.STEPPED:
        raise RuntimeError("step() has already been called since the last update().")


def refuse_closure(*args: Any, **kwargs: Any) -> None:
    """Raises torch's error if a closure is among the arguments of `step`."""
    if "closure" in kwargs or (args and callable(args[0])):
        raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")


def refuse_clip(optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    """Raises if `step` is asked to clip by another scaler's name for it, unless the optimizer's own `step` takes it."""
    if not (asked := [name for name in given if name in CLIPS]):
        return
    takes = inspect.signature(optimizer.step).parameters
    if asked[0] not in takes and not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values()):
        raise TypeError(
            "`scaler.step` passes keywords on to the `step` of the optimizer, which has no argument "
            f"{asked[0]!r}. Received: {asked[0]}={short(given[asked[0]])}. {ANSWERS['torch drop-in']['clip']}"
        )


def refuse_clip_by(optimizer: Optimizer, asked: bool) -> None:
    """Raises if `step` is asked to clip for an optimizer that unscales the gradients itself."""
    if asked:
        raise TypeError(
            "`clip_norm` and `clip_value` need an optimizer whose gradients the scaler unscales. Received: "
            f"{type(optimizer).__name__}, whose `step` takes a `grad_scaler` and does all of it itself. "
            "Call `scaler.unscale_(optimizer)`, then `torch.nn.utils.clip_grad_norm_`."
        )


def refuse_half(optimizer: Optimizer, gradients: Iterable[Tensor]) -> None:
    """Raises torch's error for FP16 gradients outside of a fused kernel, with a note that names the parameters."""
    if torch.float16 not in {grad.dtype for grad in gradients}:
        return
    half = [each for each in parameters_of([optimizer]) if getattr(each.grad, "dtype", None) is torch.float16]
    error = ValueError("Attempting to unscale FP16 gradients.")
    error.add_note(
        f"FP16 parameters: {some(Names(()), half, [optimizer])}. "
        "Keep parameters in float32 and compute under `torch.autocast`; or wrap the optimizer, as "
        "`gradscale.torch.MasterWeights(optimizer, grad_fp32=True)`, for float32 gradients."
    )
    raise error


def refuse_divided(optimizer: Optimizer, others: Iterable[Optimizer]) -> None:
    """Raises if one of `others`, which have divided their gradients, holds some of the same."""
    # torch's scaler divides such a gradient once for each optimizer: the update is too small by a factor of the scale.
    for other in others:
        if other is optimizer:
            continue
        # By the gradient: two parameters may hold one.
        theirs = {id(parameter.grad) for parameter in parameters_of([other]) if parameter.grad is not None}
        if shared := [parameter for parameter in parameters_of([optimizer]) if id(parameter.grad) in theirs]:
            raise RuntimeError(
                "A parameter may belong to one optimizer of a backward pass only: each divides its gradient by the "
                f"scale. Shared with another {type(other).__name__}: {some(Names(()), shared, [optimizer])}. Take them "
                "out of one of the two, or give both to one `gradscale.torch.LossScaler.step`, which divides once."
            )


def refuse_added_groups(optimizer: Optimizer, unscaled: int | None) -> None:
    """Raises if groups that came after the first `unscaled` ones have gradients, which are still scaled.

    None where a subclass has unscaled them itself: nothing is known then.
    """
    # torch's scaler applies them as they are: the update is too large by a factor of the scale.
    groups = () if unscaled is None else optimizer.param_groups[unscaled:]
    added = [parameter for group in groups for parameter in group["params"]]
    if late := [parameter for parameter in added if parameter.grad is not None]:
        raise RuntimeError(
            "A parameter group was added after `unscale_`, and its gradients are still scaled: "
            f"{some(Names(()), late, [optimizer])}. Add groups before `unscale_` or after `step`."
        )


def replaced(optimizers: Iterable[Optimizer], states: Mapping[int, dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Yields the states of optimizers whose gradients were unscaled, and then cleared without a step."""
    for optimizer in optimizers:
        state = states.get(id(optimizer), {})
        if state.get("stage") is OptState.UNSCALED and not gradients_of(optimizer):
            yield state


def refuse_replaced(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raises if the gradients that were unscaled are gone, and others, which are still scaled, took their place."""
    # torch's scaler applies them as they are: the update is too large by a factor of the scale.
    if state.get("replaced") and gradients_of(optimizer):
        raise RuntimeError(
            "The gradients of this optimizer were cleared after `unscale_`, and made anew by another backward pass: "
            f"they are still scaled. {LEFT_OUT}"
        )


def unchecked_gradients(optimizer: Optimizer) -> AssertionError:
    """Returns torch's error for an optimizer without checked gradients, with a note on the likely cause."""
    error = AssertionError("No inf checks were recorded for this optimizer.")
    if gradients_of(optimizer):
        error.add_note("Its gradients were made after `unscale_`. Call `unscale_` after the backward pass.")
        return error
    error.add_note(
        f"None of the {sum(1 for _ in parameters_of([optimizer]))} parameters of this {type(optimizer).__name__} "
        "has a gradient: frozen, unused by the loss, or not the model's (was the model moved or wrapped afterwards?)."
    )
    return error
