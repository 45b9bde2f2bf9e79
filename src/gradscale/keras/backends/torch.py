"""Keras on torch: one wait for the gradients, and from there on the rule runs on the host."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gradscale.engine.host import SCALARS
from gradscale.keras.backends import Asked, Assign, Measured, Update
from gradscale.keras.packing import on_host
from gradscale.kernels.torch import share_above
from gradscale.torch.step.measure import measure as read

T = TypeVar("T")

XP = SCALARS


@torch.compiler.disable  # the rule runs on the host, where there is nothing to compile
@torch.no_grad()
def measure(grads: Sequence[Any], overwrites: Sequence[bool], loss: Any, asked: Asked) -> Measured:
    """Returns what was found in the gradients. Waits for the device."""
    values = [_values(grad) for grad in grads]
    device = values[0].device
    sizes = read(values, device, norm=False, half=False).sizes
    is_own = torch.tensor(overwrites, device=device)
    scaled = [grad for grad, own in zip(values, overwrites, strict=True) if not own]
    nothing = torch.zeros((), device=device)
    norm = read(scaled, device, norm=True, half=False).total if asked.norm else nothing
    share = nothing if asked.edge is None else share_above(scaled, torch.tensor(asked.edge, device=device), device)
    bad_loss = nothing if loss is None else (~torch.isfinite(torch.as_tensor(loss)).all()).to(device, torch.float32)
    amax = sizes.where(~is_own, 0).amax()
    known = [amax, sizes.where(is_own, 0).amax(), amax, norm, share, bad_loss]
    *numbers, bad = np.array(torch.stack(known).tolist(), np.float32)
    return Measured(sizes, *numbers, loss_finite=np.bool_(bad == 0))


def divided(grads: Sequence[Any], scale: Any) -> list[Any]:
    """Returns gradients divided by the scale, in float32 or wider: one call for all of them."""
    wide = [grad.float() if grad.dtype.itemsize < 4 else grad for grad in grads]
    return list(torch._foreach_div(wide, float(scale))) if wide else []  # pyright: ignore[reportPrivateImportUsage]


def leaves(value: Any, dtype: str) -> list[Any]:
    """Returns the elements of a variable's value as numpy scalars. Waits for the device."""
    return on_host(value, dtype)


def vector(leaves: Sequence[Any], dtype: str) -> Any:
    """Returns leaves as a vector."""
    return np.array(leaves, dtype)


def gate(applied: Any, update: Callable[[], None], variables: Sequence[Any], assign: Assign) -> None:
    """Runs `update` if `applied` holds."""
    del variables, assign
    if applied:
        update()


@torch.compiler.disable
@np.errstate(all="ignore")
def together(
    finish: Callable[[Measured | None, Update], T],
    measured: Measured | None,
    update: Callable[[Any, Any, Any], None],
    grads: Sequence[Any],
    variables: Sequence[Any],
) -> T:
    """Returns what `finish` makes of what was measured and of the update."""
    return finish(measured, lambda scale: update(grads, variables, scale))


def is_constant(value: Any) -> bool:
    """Returns False: a variable is read anew at each step."""
    del value
    return False


def _values(grad: Tensor) -> Tensor:
    """Returns the numbers of a gradient, dense or sparse."""
    return grad.coalesce().values() if grad.is_sparse else grad.detach()
