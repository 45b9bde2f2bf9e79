"""`prepare`: casts a float32 model for mixed-precision training, with its optimizer and a scaler."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscale.formats import FP16
from gradscale.torch.checks import check_modules, some
from gradscale.torch.fused_sgd import refuse_broken_fused_sgd
from gradscale.torch.masters import MasterWeights
from gradscale.torch.masters.inner_optimizer import check_inner_optimizer
from gradscale.torch.precision.casts import cast_models, input_output_cast_of
from gradscale.torch.precision.levels import Precision, as_precision
from gradscale.torch.scaler import LossScaler
from gradscale.torch.step.gradients import Names, parameters_of

Model = TypeVar("Model", bound=nn.Module)
Optimizers = TypeVar("Optimizers", Optimizer, Sequence[Optimizer], None)

WRAPPERS = {name: name for name in ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")} | {
    "FSDPModule": "fully_shard",
    "GraphModule": "torch.fx",
    "OptimizedModule": "torch.compile",
    "ScriptModule": "torch.jit",
}
"""Classes that hold references to a module's parameters or its code, and what makes them. By name: importing some is
slow."""


@overload
def prepare(
    model: Model, optimizer: Optimizers, precision: Precision | str = "O1"
) -> tuple[Model, Optimizers, LossScaler]: ...
@overload
def prepare(
    model: Sequence[Model], optimizer: Optimizers, precision: Precision | str = "O1"
) -> tuple[list[Model], Optimizers, LossScaler]: ...
def prepare(model: Any, optimizer: Any, precision: Precision | str = "O1") -> tuple[Any, Any, LossScaler]:
    """Returns model, optimizer and scaler, ready to be trained in `precision`.

        model, optimizer, scaler = prepare(model, torch.optim.AdamW(model.parameters()), "O1")
        for x, y in loader:
            scaler.backward(loss_fn(model(x), y))
            scaler.step(optimizer, clip_norm=1.0)
            optimizer.zero_grad()

    The model is the same object, changed in place: its inputs and outputs are cast, and in between it runs as
    `precision` says. Its parameters are the same objects, so the optimizer may have been built, and may have run,
    before. Call it before `torch.compile`, DDP or FSDP.

    Args:
        model: a float32 model, or a list of models; a list is returned then.
        optimizer: the optimizer, or a list of optimizers, of their parameters; a list is returned then. None if the
            optimizer has to be built later, as for FSDP; if the precision has master weights, wrap it in
            `MasterWeights` yourself.
        precision: a `Precision` or the name of a level: `"O0"` to `"O3"`; `"O1-bf16"` to `"O3-bf16"`; or `"fp32"`,
            `"fp16"` and `"bf16"`, which are O0, O1 and O1 with BF16.

    Raises:
        TypeError: the model is not a module, or the optimizer not an optimizer, as when they are swapped.
        RuntimeError: the model is already prepared, wrapped or compiled. Nothing has been changed then.
        ValueError: the precision is unknown, a parameter is not float32, models and optimizers do not belong together,
            or an optimizer would divide by an `eps` that is 0 in FP16. Nothing has been changed then, nor after an
            error of an optimizer.
    """
    chosen = as_precision(precision)
    _check_order(model, optimizer)
    models, optimizers = check_modules(model), as_optimizers(optimizer)
    _check_models(models, chosen)
    _check_optimizers(optimizers, models, chosen)
    # Without optimizers nothing can fail half-way, and the float32 weights need not outlive their cast.
    with _undone_on_error(models if optimizers else (), optimizers) as float32:
        cast_models(models, chosen)
        prepared: list[Any] = []
        for each in optimizers:
            if chosen.master_weights is not None:
                masters = MasterWeights(each, chosen.master_weights)
                masters.refine(float32)
                prepared.append(masters)
                continue
            if chosen.half_weights:
                # Existing state is float32. torch casts state to the dtype of the parameters when it loads it.
                each.load_state_dict(each.state_dict())
            prepared.append(each)
        _check_updates(prepared)
    scaler = LossScaler(models, chosen.scaling())
    returned = prepared[0] if isinstance(optimizer, Optimizer) else prepared or None
    return model if isinstance(model, nn.Module) else models, returned, scaler


@contextmanager
def _undone_on_error(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Iterator[Mapping[Tensor, Tensor]]:
    """Yields the values from before the block by parameter, and undoes the block if it raises. Copies no tensor.

    Casts replace the data of parameters, and optimizers the entries of their groups and their state, so that references
    to the old ones are enough. They are kept until the end of the block.
    """
    modules = [(module, type(module)) for model in models for module in model.modules()]
    weights = [weight for model in models for weight in model.parameters()]
    # Detached: a cast sets `data`, and these keep referring to the old data.
    values = {each: each.detach() for weight in weights for each in (weight, weight.grad) if each is not None}
    dicts: list[dict[Any, Any]] = [each for module, _ in modules for each in (vars(module), module._buffers)]
    dicts += [each for optimizer in optimizers for each in (vars(optimizer), *optimizer.param_groups, optimizer.state)]
    copies = [dict(each) for each in dicts]
    groups = [list(optimizer.param_groups) for optimizer in optimizers]
    try:
        yield values
    except BaseException:
        for module, kind in modules:
            module.__class__ = kind
        for tensor, data in values.items():
            tensor.data = data
        for changed, copy in zip(dicts, copies, strict=True):
            changed.clear()
            changed.update(copy)
        for optimizer, before in zip(optimizers, groups, strict=True):
            optimizer.param_groups = before
        raise


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


def _check_order(model: Any, optimizer: Any) -> None:
    """Raises if an optimizer was given in the place of the model, or a model in that of the optimizer."""
    wrong = [
        any(isinstance(one, kind) for one in (given if isinstance(given, list | tuple) else [given]))
        for given, kind in ((model, Optimizer), (optimizer, nn.Module))
    ]
    if any(wrong):
        kinds = f"{type(model).__name__}, {type(optimizer).__name__}"
        swap, call = "Swap them: `prepare(model, optimizer)`.", "Call it as `prepare(model, optimizer, 'O1')`."
        fix = swap if all(wrong) else call
        raise TypeError(f"`prepare` takes the model first, then its optimizer. Received: {kinds}. {fix}")


def _check_models(models: Sequence[nn.Module], precision: Precision) -> None:
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


def _check_optimizers(optimizers: Sequence[Optimizer], models: Sequence[nn.Module], precision: Precision) -> None:
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


def _check_updates(optimizers: Sequence[Optimizer]) -> None:
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
