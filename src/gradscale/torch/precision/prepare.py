"""`prepare`: casts a float32 model for mixed-precision training, with its optimizer and a scaler."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from gradscale.torch.checks import check_modules
from gradscale.torch.masters import MasterWeights
from gradscale.torch.precision.checks import as_optimizers, check_order, check_together, check_updates
from gradscale.torch.precision.levels import Precision, as_precision
from gradscale.torch.precision.rollback import undone_on_error
from gradscale.torch.precision.weight_cast import plan_weight_cast
from gradscale.torch.scaler import LossScaler
from gradscale.torch.step.gradients import parameters_of

Optimizer = torch.optim.Optimizer
Model = TypeVar("Model", bound=nn.Module)


@overload
def prepare(
    model: Model, optimizer: Optimizer, precision: Precision | str = "O1"
) -> tuple[Model, Optimizer, LossScaler]: ...
@overload
def prepare(
    model: Model, optimizer: Sequence[Optimizer], precision: Precision | str = "O1"
) -> tuple[Model, list[Optimizer], LossScaler]: ...
@overload
def prepare(model: Model, optimizer: None, precision: Precision | str = "O1") -> tuple[Model, None, LossScaler]: ...
@overload
def prepare(
    model: Sequence[Model], optimizer: None, precision: Precision | str = "O1"
) -> tuple[list[Model], None, LossScaler]: ...
@overload
def prepare(
    model: Sequence[Model], optimizer: Optimizer, precision: Precision | str = "O1"
) -> tuple[list[Model], Optimizer, LossScaler]: ...
@overload
def prepare(
    model: Sequence[Model], optimizer: Sequence[Optimizer], precision: Precision | str = "O1"
) -> tuple[list[Model], list[Optimizer], LossScaler]: ...
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
    check_order(model, optimizer)
    models, optimizers = check_modules(model), as_optimizers(optimizer)
    check_together(models, optimizers, chosen)
    weight_cast = plan_weight_cast(models, chosen)
    # `_apply` sets `data`, so that these detached tensors keep the float32 values.
    float32 = {parameter: parameter.detach() for parameter in parameters_of(optimizers)}
    # Without optimizers nothing can fail, and the float32 weights need not outlive their cast.
    with undone_on_error(models if optimizers else (), optimizers):
        weight_cast.apply(chosen.compute)
        prepared = [_prepared(each, chosen, float32) for each in optimizers]
        check_updates(prepared)
    scaler = LossScaler(models, chosen.scaling())
    returned = prepared[0] if isinstance(optimizer, Optimizer) else prepared or None
    return model if isinstance(model, nn.Module) else models, returned, scaler


def _prepared(optimizer: Optimizer, precision: Precision, float32: Mapping[Tensor, Tensor]) -> Optimizer:
    """Returns the optimizer for parameters that were cast, with their `float32` values from before."""
    if precision.master_weights is not None:
        masters = MasterWeights(optimizer, precision.master_weights)
        masters.refine(float32)
        return masters
    if precision.half_weights:
        # Existing state is float32. torch casts state to the dtype of the parameters when it loads it.
        optimizer.load_state_dict(optimizer.state_dict())
    return optimizer
