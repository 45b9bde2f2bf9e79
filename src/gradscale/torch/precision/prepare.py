"""`prepare`: casts a float32 model for mixed-precision training, with its optimizer and a scaler."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, overload

from torch import Tensor, nn
from torch.optim import Optimizer

from gradscale.torch.checks import check_modules
from gradscale.torch.masters import MasterWeights
from gradscale.torch.precision.casts import cast_models
from gradscale.torch.precision.checks import as_optimizers, check_models, check_optimizers, check_order, check_updates
from gradscale.torch.precision.levels import Precision, as_precision
from gradscale.torch.scaler import LossScaler

Model = TypeVar("Model", bound=nn.Module)
Optimizers = TypeVar("Optimizers", Optimizer, Sequence[Optimizer], None)


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
    check_order(model, optimizer)
    models, optimizers = check_modules(model), as_optimizers(optimizer)
    check_models(models, chosen)
    check_optimizers(optimizers, models, chosen)
    # Without optimizers nothing can fail half-way, and the float32 weights need not outlive their cast.
    with _undone_on_error(models if optimizers else (), optimizers) as float32:
        cast_models(models, chosen)
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
    attributes = [(optimizer, list(optimizer.param_groups), optimizer.state) for optimizer in optimizers]
    dicts: list[dict[Any, Any]] = [each for module, _ in modules for each in (vars(module), module._buffers)]
    dicts += [each for _, groups, state in attributes for each in (*groups, state)]
    copies = [dict(each) for each in dicts]
    try:
        yield values
    except BaseException:
        for module, kind in modules:
            module.__class__ = kind
        for tensor, data in values.items():
            tensor.data = data
        for optimizer, groups, state in attributes:
            optimizer.param_groups, optimizer.state = groups, state
        for changed, copy in zip(dicts, copies, strict=True):
            changed.clear()
            changed.update(copy)
        raise
