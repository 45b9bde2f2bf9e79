"""`prepare`: casts a float32 model for mixed-precision training, with its optimizer and a scaler."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscale.formats import FP16
from gradscale.torch.cast import cast
from gradscale.torch.checks import check_modules, some
from gradscale.torch.gradients import Names, parameters_of
from gradscale.torch.masters import MasterWeights
from gradscale.torch.precision.casts import input_output_cast_of, plan_casts, set_input_output_cast
from gradscale.torch.precision.levels import Precision, as_precision
from gradscale.torch.scaler import LossScaler

Models = TypeVar("Models", bound=nn.Module | Sequence[nn.Module])
Optimizers = TypeVar("Optimizers", Optimizer, Sequence[Optimizer], None)

WRAPPERS = {name: name for name in ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")}
WRAPPERS |= {"FSDPModule": "fully_shard", "OptimizedModule": "torch.compile"}
"""Classes that hold references to a module's parameters or its code, and what makes them. By name: importing some is
slow."""


def prepare(
    model: Models, optimizer: Optimizers, precision: Precision | str = "O1"
) -> tuple[Models, Optimizers, LossScaler]:
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
            or an optimizer would divide by an `eps` that is 0 in FP16. Nothing has been changed then.
    """
    chosen = as_precision(precision)
    if isinstance(model, Optimizer):
        raise TypeError(
            "`prepare` takes the model first, then its optimizer. "
            f"Received: {type(model).__name__}, {type(optimizer).__name__}. Swap them: `prepare(model, optimizer)`."
        )
    models, optimizers = check_modules(model), as_optimizers(optimizer)
    _check_models(models, chosen)
    _check_optimizers(optimizers, models)
    to_half, casts = plan_casts(models, chosen)
    half: list[Tensor] = [weight for module in to_half for weight in module.parameters(recurse=False)]
    # Before the cast, since some optimizers are refused here.
    masters = [MasterWeights(each, chosen.master_weights) for each in optimizers] if chosen.master_weights else []
    if chosen.compute is torch.float16 and not masters:
        _check_eps(optimizers, half)
    # Detached: a cast sets `data`, and these keep referring to the old data.
    float32 = {weight: weight.detach() for weight in half if masters}
    for module in to_half:
        # One module at a time, and not `model.half()`: its submodules may stay float32.
        module._apply(lambda tensor: cast(tensor, chosen.compute, [torch.float32]), recurse=False)
    for module, how in casts.items():
        set_input_output_cast(module, how)
    for each in masters:
        each.sync_from_model()
        each.refine(float32)
    for each in optimizers if chosen.half_weights and not masters else ():
        # Existing state is float32. torch casts state to the dtype of the parameters when it loads it.
        each.load_state_dict(each.state_dict())
    optimizers = masters or optimizers
    scaler = LossScaler(models, chosen.scaling())
    prepared: Any = optimizers[0] if isinstance(optimizer, Optimizer) else optimizers or None
    same: Any = model if isinstance(model, nn.Module) else models
    return same, prepared, scaler


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


def _check_models(models: Sequence[nn.Module], precision: Precision) -> None:
    """Raises if one of these models cannot be prepared."""
    for name, module in (found for model in models for found in model.named_modules()):
        where = f"{type(module).__name__} at {name!r}" if name else type(module).__name__
        if input_output_cast_of(module) is not None:
            raise RuntimeError(
                f"`prepare` changes a model once, and this one has been prepared. Received: {where}. "
                "Use what the first call returned; for another precision, build the model again."
            )
        if wrapper := next((WRAPPERS[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in WRAPPERS), ""):
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
    for name, parameter in (found for model in models for found in model.named_parameters()):
        allowed = (torch.float32,) if parameter.requires_grad else (torch.float32, precision.compute)
        if parameter.is_floating_point() and parameter.dtype not in allowed:
            raise ValueError(
                "`prepare` takes a float32 model and casts it itself: half weights have lost their low bits. "
                f"Received: {name!r} in {parameter.dtype}. Load the weights in float32 or call `model.float()`; "
                f"frozen parameters may be {precision.compute} already."
            )


def _check_optimizers(optimizers: Sequence[Optimizer], models: Sequence[nn.Module]) -> None:
    """Raises if an optimizer has parameters that are not of these models."""
    names = Names(models)
    owned = set(names.parameters())
    for optimizer in optimizers:
        if unknown := [parameter for parameter in parameters_of([optimizer]) if parameter not in owned]:
            raise ValueError(
                "Every parameter of the optimizer must belong to the models given. "
                f"Received: {type(optimizer).__name__} with {some(names, unknown, [optimizer])}, which do "
                "not. Pass all models that it trains, or build it from `model.parameters()` of these."
            )


def _check_eps(optimizers: Sequence[Optimizer], half: Iterable[Tensor]) -> None:
    """Raises if one of the optimizers would divide by 0 in FP16, which the parameters `half` are about to become."""
    fp16 = set(half)
    # Of torch's own only: others may compute in float32, as apex's do.
    for optimizer in (each for each in optimizers if type(each).__module__.startswith("torch.optim.")):
        groups = (group for group in optimizer.param_groups if not fp16.isdisjoint(group["params"]))
        # Adafactor has two, of which one may be None, and SGD has none.
        given = (group.get("eps") for group in groups)
        found = (eps for one in given for eps in (one if isinstance(one, tuple | list) else (one,)) if eps is not None)
        if lost := [float(eps) for eps in found if eps < FP16.smallest_subnormal]:
            raise ValueError(
                f"FP16 holds no `eps` below {FP16.smallest_subnormal:.1e}, and squares of small gradients are 0 in it "
                "too: without master weights torch's optimizers divide 0 by 0, and the weights become NaN. "
                f"Received: {type(optimizer).__name__} with eps={lost[0]:g}. Use master weights, as 'O2' does, or "
                "BF16; or build it with an `eps` that FP16 holds, such as 1e-4."
            )
