"""Checks of the arguments of `prepare`, before it changes anything, and of optimizers of half weights."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscale.formats import FP16
from gradscale.torch.checks import some
from gradscale.torch.fused_sgd import refuse_broken_fused_sgd
from gradscale.torch.masters import MasterWeights
from gradscale.torch.masters.inner_optimizer import check_inner_optimizer
from gradscale.torch.precision.casts import input_output_cast_of
from gradscale.torch.precision.levels import Precision
from gradscale.torch.step.gradients import Names, parameters_of

WRAPPERS = {name: name for name in ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")} | {
    "FSDPModule": "fully_shard",
    "GraphModule": "torch.fx",
    "OptimizedModule": "torch.compile",
    "ScriptModule": "torch.jit",
}
"""Classes that hold references to a module's parameters or its code, and what makes them. By name: importing some is
slow."""


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


def check_order(model: Any, optimizer: Any) -> None:
    """Raises if an optimizer was given in the place of the model, or a model in that of the optimizer."""

    def holds(given: Any, kind: type) -> bool:
        return any(isinstance(one, kind) for one in (given if isinstance(given, list | tuple) else [given]))

    wrong = [holds(model, Optimizer), holds(optimizer, nn.Module)]
    if any(wrong):
        kinds = f"{type(model).__name__}, {type(optimizer).__name__}"
        swap, call = "Swap them: `prepare(model, optimizer)`.", "Call it as `prepare(model, optimizer, 'O1')`."
        fix = swap if all(wrong) else call
        raise TypeError(f"`prepare` takes the model first, then its optimizer. Received: {kinds}. {fix}")


def check_models(models: Sequence[nn.Module], precision: Precision) -> None:
    """Raises if these models cannot be prepared together."""
    if not models:
        raise TypeError("`prepare` takes at least one model. Received: none.")
    counts = Counter(module for model in models for module in model.modules())
    for model in models:
        if counts[model] > 1:
            raise ValueError(
                "`prepare` takes each model once, and none that is a part of another. "
                f"Received: {type(model).__name__} twice. Pass the outermost model only."
            )
        for name, module in model.named_modules():
            _check_module(module, f"{type(module).__name__} at {name!r}" if name else type(module).__name__)
        for name, parameter in model.named_parameters():
            _check_parameter(parameter, name, precision.compute)


def _check_module(module: nn.Module, where: str) -> None:
    if input_output_cast_of(module) is not None:
        raise RuntimeError(
            f"`prepare` changes a model once, and this one has been prepared. Received: {where}. "
            "Use what the first call returned; for another precision, build the model again."
        )
    if wrapper := next((WRAPPERS[base.__name__] for base in type(module).__mro__ if base.__name__ in WRAPPERS), None):
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


def _check_parameter(parameter: Tensor, name: str, compute: torch.dtype) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
        raise ValueError(
            f"`prepare` takes a model with materialized weights. Received: {name!r} without values. Load the "
            "weights with `to_empty` and `load_state_dict`, or run a lazy module once, and prepare it then."
        )
    allowed = (torch.float32,) if parameter.requires_grad else (torch.float32, compute)
    if parameter.is_floating_point() and parameter.dtype not in allowed:
        raise ValueError(
            "`prepare` takes a float32 model and casts it itself: half weights have lost their low bits. "
            f"Received: {name!r} in {parameter.dtype}. Load the weights in float32 or call `model.float()`; "
            f"frozen parameters may be {compute} already."
        )


def check_optimizers(optimizers: Sequence[Optimizer], models: Sequence[nn.Module], precision: Precision) -> None:
    """Raises if these optimizers do not belong to the models, or cannot be given master weights."""
    names = Names(models)
    owned = set(names.parameters())
    for optimizer in optimizers:
        if isinstance(optimizer, MasterWeights):
            raise RuntimeError(
                "`prepare` adds master weights if the precision has them. Received: a `MasterWeights`. "
                "Pass its inner optimizer."
            )
        if precision.master_weights is not None:
            check_inner_optimizer(optimizer)
        if unknown := [parameter for parameter in parameters_of([optimizer]) if parameter not in owned]:
            raise ValueError(
                "Every parameter of the optimizer must belong to the models given. "
                f"Received: {type(optimizer).__name__} with {some(names, unknown, [optimizer])}, which do "
                "not. Pass all models that it trains, or build it from `model.parameters()` of these."
            )
    if shared := [parameter for parameter, count in Counter(parameters_of(optimizers)).items() if count > 1]:
        raise ValueError(
            "A parameter must belong to one optimizer. "
            f"Received: {some(names, shared, optimizers)} in two. Leave it out of one of them."
        )


def check_updates(optimizers: Sequence[Optimizer]) -> None:
    """Raises if one of the optimizers, of parameters that were cast, is known to fail on half weights."""
    refuse_broken_fused_sgd(optimizers)
    for optimizer in optimizers:
        bases = [base.__module__ for base in type(optimizer).__mro__ if base is not Optimizer]
        # Of torch's own only: others may compute in float32, as apex's and `MasterWeights` do.
        if any(base.startswith("torch.optim.") for base in bases) and (eps := lost_eps(optimizer)) is not None:
            raise ValueError(
                f"FP16 holds no `eps` below {FP16.smallest_subnormal:.1e}, and squares of small gradients are 0 in it "
                "too: without master weights torch's optimizers divide 0 by 0, and the weights become NaN. "
                f"Received: {type(optimizer).__name__} with eps={eps:g}. Use master weights, as 'O2' does, or BF16; or "
                "build it with an `eps` that FP16 holds, such as 1e-4."
            )


def lost_eps(optimizer: Optimizer) -> float | None:
    """Returns an `eps` of the optimizer that FP16 does not hold, of a group with FP16 parameters; else None.

    >>> lost_eps(torch.optim.Adam(torch.nn.Linear(2, 2).half().parameters()))
    1e-08
    """
    for group in optimizer.param_groups:
        if any(parameter.dtype is torch.float16 for parameter in group["params"]):
            given = group.get("eps")
            # Adafactor has two, of which one may be None, and SGD has none.
            for eps in given if isinstance(given, tuple | list) else (given,):
                if eps is not None and eps < FP16.smallest_subnormal:
                    return float(eps)
    return None
