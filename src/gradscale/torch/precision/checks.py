"""Checks of the arguments of `prepare`, before it changes anything."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.formats import FP16
from gradscale.torch.checks import some
from gradscale.torch.fused_sgd import refuse_broken_fused_sgd
from gradscale.torch.masters import MasterWeights
from gradscale.torch.masters.inner_optimizer import check_inner_optimizer
from gradscale.torch.precision.input_output_cast import input_output_cast_of
from gradscale.torch.precision.levels import Precision
from gradscale.torch.precision.lost_eps import lost_eps
from gradscale.torch.precision.weight_cast import unmatched
from gradscale.torch.step.gradients import Names, parameters_of

Optimizer = torch.optim.Optimizer

WRAPPERS = {
    "DataParallel": "DataParallel",
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
    "GraphModule": "torch.fx",
    "OptimizedModule": "torch.compile",
    "ScriptModule": "torch.jit",
}
"""Classes that hold references to a module's parameters or its code, and what makes them. By name: importing some is
slow."""


def check_order(model: Any, optimizer: Any) -> None:
    """Raises if an optimizer was given in the place of the model, or a model in that of the optimizer."""
    if _holds(model, Optimizer) or _holds(optimizer, nn.Module):
        kinds = f"{type(model).__name__}, {type(optimizer).__name__}"
        both = _holds(model, Optimizer) and _holds(optimizer, nn.Module)
        fix = "Swap them: `prepare(model, optimizer)`." if both else "Call it as `prepare(model, optimizer, 'O1')`."
        raise TypeError(f"`prepare` takes the model first, then its optimizer. Received: {kinds}. {fix}")


def _holds(given: Any, kind: type) -> bool:
    """Returns whether `given` is one of a kind, or a list of them."""
    return isinstance(given, kind) or (isinstance(given, list | tuple) and any(isinstance(one, kind) for one in given))


def check_together(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], precision: Precision) -> None:
    """Raises if these models and optimizers cannot be prepared together."""
    _check_models(models)
    for model in models:
        _check_unwrapped(model)
        _check_parameters(model, precision)
    if unknown := unmatched(models, precision):
        raise ValueError(
            "Every name pattern in `keep_fp32` must match a module, as `model.named_modules()` names them. "
            f"Received: {', '.join(map(repr, unknown))}, which match none."
        )
    for optimizer in optimizers:
        _check_optimizer(optimizer, precision)
    _check_owned(models, optimizers)


def check_updates(optimizers: Sequence[Optimizer]) -> None:
    """Raises if one of the optimizers, of parameters that were cast, is known to fail on half weights."""
    refuse_broken_fused_sgd(optimizers)
    for optimizer in optimizers:
        # Of torch's own only: others may compute in float32, as apex's and `MasterWeights` do.
        if not any(
            base.__module__.startswith("torch.optim.") for base in type(optimizer).__mro__ if base is not Optimizer
        ):
            continue
        eps = lost_eps(optimizer)
        if eps is not None:
            raise ValueError(
                f"FP16 holds no `eps` below {FP16.smallest_subnormal:.1e}, and squares of small gradients are 0 in it "
                "too: without master weights torch's optimizers divide 0 by 0, and the weights become NaN. "
                f"Received: {type(optimizer).__name__} with eps={eps:g}. Use master weights, as 'O2' does, or BF16; or "
                "build it with an `eps` that FP16 holds, such as 1e-4."
            )


def as_optimizers(optimizer: Any) -> list[Optimizer]:
    """Returns `optimizer` as a list: of itself, of several, or empty if it is None."""
    if optimizer is None:
        return []
    found = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    if not found or not all(isinstance(each, Optimizer) for each in found):
        raise TypeError(
            "`optimizer` must be a torch optimizer of the model's parameters, a list of them, or None. "
            f"Received: {optimizer!r}."
        )
    return found


def _check_models(models: Sequence[nn.Module]) -> None:
    if not models:
        raise TypeError("`prepare` takes at least one model. Received: none.")
    counts = Counter(id(module) for model in models for module in model.modules())
    for model in models:
        if counts[id(model)] > 1:
            raise ValueError(
                "`prepare` takes each model once, and none that is a part of another. "
                f"Received: {type(model).__name__} twice. Pass the outermost model only."
            )


def _check_unwrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        where = f"{type(module).__name__} at {name!r}" if name else type(module).__name__
        if input_output_cast_of(module) is not None:
            raise RuntimeError(
                f"`prepare` changes a model once, and this one has been prepared. Received: {where}. "
                "Use what the first call returned; for another precision, build the model again."
            )
        classes = [base.__name__ for base in type(module).__mro__]
        if wrapper := next((WRAPPERS[name] for name in classes if name in WRAPPERS), None):
            raise RuntimeError(
                f"`prepare` must come before {wrapper}, which holds references to the model's parameters or code. "
                f"Received: {where}. Prepare the plain model, then wrap it. For an optimizer that must be built after "
                "that, call `prepare(model, None)`."
            )
        if "forward" in vars(module):
            raise RuntimeError(
                "`prepare` changes how a model's class runs, and this `forward` was replaced on the object itself. "
                f"Received: {where}. Prepare the model first, then replace its `forward`."
            )


def _check_parameters(model: nn.Module, precision: Precision) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
            raise ValueError(
                f"`prepare` takes a model with materialized weights. Received: {name!r} without values. Load the "
                "weights with `to_empty` and `load_state_dict`, or run a lazy module once, and prepare it then."
            )
        allowed = (torch.float32,) if parameter.requires_grad else (torch.float32, precision.compute)
        if parameter.is_floating_point() and parameter.dtype not in allowed:
            raise ValueError(
                "`prepare` takes a float32 model and casts it itself: half weights have lost their low bits. "
                f"Received: {name!r} in {parameter.dtype}. Load the weights in float32 or call `model.float()`; "
                f"frozen parameters may be {precision.compute} already."
            )


def _check_optimizer(optimizer: Optimizer, precision: Precision) -> None:
    if isinstance(optimizer, MasterWeights):
        raise RuntimeError(
            "`prepare` adds master weights if the precision has them. Received: a `MasterWeights`. "
            "Pass its inner optimizer."
        )
    if precision.master_weights is not None:
        check_inner_optimizer(optimizer)


def _check_owned(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    owned = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        unknown = [parameter for parameter in parameters_of([optimizer]) if id(parameter) not in owned]
        if unknown:
            raise ValueError(
                "Every parameter of the optimizer must belong to the models given. "
                f"Received: {type(optimizer).__name__} with {some(Names(models), unknown, [optimizer])}, which do "
                "not. Pass all models that it trains, or build it from `model.parameters()` of these."
            )
    _check_once(models, optimizers)


def _check_once(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    held: Counter[Tensor] = Counter(parameters_of(optimizers))
    if shared := [parameter for parameter, count in held.items() if count > 1]:
        raise ValueError(
            "A parameter must belong to one optimizer. "
            f"Received: {some(Names(models), shared, optimizers)} in two. Leave it out of one of them."
        )
