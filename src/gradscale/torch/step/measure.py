"""Room one, measure: a single read of the gradients that says whether they are finite, how large, and which are not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradscale.formats import FP16
from gradscale.record import Array
from gradscale.torch.step.groups import Alike, alike

DOT_FROM = 32_768
"""Elements from which `dot` beats the multi-tensor norm on CPU: below, its call costs more than its loop saves."""

CAST_AT_ONCE = 262_144
"""Elements of a 16-bit gradient that are cast to float32 together: they stay in the cache until they are multiplied."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one read of the gradients found, still in the units it found them in, on the scaler's device.

    Attributes:
        sizes: one number per gradient, its norm or its largest magnitude; inf or NaN where the gradient holds one.
        total: the same over all gradients.
        half: largest magnitude in any FP16 gradient; None where there is no such gradient.
    """

    sizes: Tensor
    total: Tensor
    half: Tensor | None

    @property
    def told_sizes(self) -> bool:
        """Whether the sizes are known, and not only that every gradient is finite."""
        return self.sizes.numel() > 0

    @property
    def amax(self) -> Tensor:
        """Largest magnitude of any gradient; where only norms were read, a bound: the largest norm of a tensor."""
        return self.sizes.amax() if self.sizes.numel() else self.total

    def finite(self, unit: Tensor) -> Tensor:
        """Returns whether every gradient is finite, now and once it is divided by `unit`, in its own type too."""
        return all_finite(self.total, self.half, unit, torch)


def all_finite(total: Array, half: Array | None, unit: Array, xp: Any) -> Array:
    """Returns whether gradients of these sizes are finite, now and once they are divided by `unit`.

    Args:
        total: size of all of them together.
        half: largest magnitude in any FP16 gradient; None where there is no such gradient.
        unit: what they will be divided by.
        xp: the namespace of these numbers.
    """
    finite = xp.isfinite(total / unit)
    return finite if half is None else xp.logical_and(finite, half / unit <= FP16.max)


@torch.no_grad()
def measure(gradients: Sequence[Tensor], device: torch.device, *, norm: bool, half: bool = True) -> Measured:
    """Returns the sizes of `gradients` on `device` after reading each once. Does not wait for the device.

    A NaN anywhere makes a size NaN; an inf makes it inf. A finite float32 gradient above 1.8e19 squares to inf and so
    counts as an overflow when norms are read. FP16 and BF16 gradients accumulate in float32. Makes no temporary larger
    than one number per gradient, and `CAST_AT_ONCE` of them.

    Args:
        gradients: dense tensors of any floating or complex type, on any device.
        device: where the results go.
        norm: read norms; otherwise largest magnitudes.
        half: read the largest magnitude of FP16 gradients, too: one that is divided in FP16, by a scale below 1, may
            leave its range.
    """
    if not gradients:
        nothing = torch.zeros(0, dtype=torch.float32, device=device)
        return Measured(nothing, nothing.sum(), None)
    groups = alike(gradients)
    sizes = _in_order(groups, [(_norms if norm else _largest)(group).to(device, torch.float32) for group in groups])
    total = torch.linalg.vector_norm(sizes) if norm else sizes.amax()
    halves = [_largest(group).amax().to(device) for group in groups if half and group.dtype is torch.float16]
    return Measured(sizes, total, torch.stack(halves).amax().float() if halves else None)


@torch.no_grad()
def share_above(gradients: Sequence[Tensor], edge: Tensor, device: torch.device) -> Tensor:
    """Returns the share of all gradient elements whose magnitude is above `edge`; inf and NaN are.

    Complex elements count as two. Reads each gradient once and makes temporaries as large as the largest of them.
    """
    real = [tensor for group in alike(gradients) for tensor in group.tensors]
    # Compared in float32: a narrower type would round the edge.
    wide = (grad.float() if grad.dtype.itemsize < 4 else grad for grad in real)
    above = [(~(grad.abs() <= edge.to(grad.device))).sum().to(device, torch.float32) for grad in wide]
    elements = sum(grad.numel() for grad in real)
    return torch.stack(above).sum() / max(1, elements) if above else torch.zeros_like(edge)


def _in_order(groups: Sequence[Alike], sizes: Sequence[Tensor]) -> Tensor:
    """Returns the sizes of all groups as one vector, in the order in which the gradients were given."""
    if len(groups) == 1:
        return sizes[0]
    placed = {
        position: size
        for group, vector in zip(groups, sizes, strict=True)
        for position, size in zip(group.positions, vector.unbind(), strict=True)
    }
    return torch.stack([placed[position] for position in range(len(placed))])


def _norms(group: Alike) -> Tensor:
    """Returns the norm of each gradient: a `dot` for a large flat tensor, a multi-tensor norm for the rest."""
    if group.device.type == "cpu" and group.dtype is not torch.float64:
        large = [grad.numel() >= DOT_FROM for grad in group.tensors]
        if any(large):
            return _norms_by_size(group.tensors, large)
    wide = torch.float64 if group.dtype is torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(group.tensors, 2, dtype=wide))  # pyright: ignore[reportPrivateImportUsage]


def _norms_by_size(gradients: Sequence[Tensor], large: Sequence[bool]) -> Tensor:
    dotted = [is_large and grad.is_contiguous() for grad, is_large in zip(gradients, large, strict=True)]
    flat = [grad.view(-1) for grad, is_dotted in zip(gradients, dotted, strict=True) if is_dotted]
    norms = torch.stack(_squared(flat)).sqrt_() if flat else torch.zeros(0)
    if len(flat) == len(gradients):
        return norms
    rest = [grad for grad, is_dotted in zip(gradients, dotted, strict=True) if not is_dotted]
    by_dot, together = iter(norms.unbind()), iter(torch._foreach_norm(rest, 2, dtype=torch.float32))  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack([next(by_dot if is_dotted else together) for is_dotted in dotted])


def _squared(flat: Sequence[Tensor]) -> list[Tensor]:
    """Returns the sum of squares of each flat gradient, all of one type, in float32."""
    if flat[0].dtype is torch.float32:
        return [torch.dot(grad, grad) for grad in flat]
    most = min(CAST_AT_ONCE, max(grad.numel() for grad in flat))
    room = torch.empty(most, dtype=torch.float32, device=flat[0].device)
    return [_squared_in(room, grad) for grad in flat]


def _squared_in(room: Tensor, grad: Tensor) -> Tensor:
    """Returns the sum of squares of a flat 16-bit gradient, which is cast to float32 in `room`, piece by piece."""
    if grad.numel() > room.numel():
        return torch.stack([_squared_in(room, piece) for piece in grad.split(room.numel())]).sum()
    cast = room[: grad.numel()].copy_(grad)
    return torch.dot(cast, cast)


def _largest(group: Alike) -> Tensor:
    """Returns the largest magnitude in each gradient; NaN where there is one."""
    extremes = [extreme for grad in group.tensors for extreme in _extremes(grad)]
    return torch.stack(extremes).abs_().view(-1, 2).amax(1)


def _extremes(grad: Tensor) -> Sequence[Tensor]:
    return torch.aminmax(grad) if grad.numel() else (grad.new_zeros(()), grad.new_zeros(()))
