"""Room one, measure: a single read of the gradients that says whether they are finite, how large, and which are not."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscale.formats import FP16

DOT_FROM = 32_768
"""Elements from which `dot` beats the multi-tensor norm on CPU: below, its call costs more than its loop saves."""


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
        finite = torch.isfinite(self.total / unit)
        return finite if self.half is None else finite & (self.half / unit <= FP16.max)


@torch.no_grad()
def measure(gradients: Sequence[Tensor], device: torch.device, *, norm: bool) -> Measured:
    """Returns the sizes of `gradients` on `device` after reading each once. Does not wait for the device.

    A NaN anywhere makes a size NaN; an inf makes it inf. A finite float32 gradient above 1.8e19 squares to inf and so
    counts as an overflow when norms are read. FP16 and BF16 gradients accumulate in float32; FP16 ones are read twice
    for their norm, because one that is divided by a scale below 1 may leave its range. Makes no temporary larger than
    one number per gradient.

    Args:
        gradients: dense tensors of any floating or complex type, on any device.
        device: where the results go.
        norm: read norms; otherwise largest magnitudes.
    """
    if not gradients:
        nothing = torch.zeros(0, dtype=torch.float32, device=device)
        return Measured(nothing, nothing.sum(), None)
    real = [as_real(grad) if grad.is_complex() else grad for grad in gradients]
    sizes = _gathered(_norms(real), device) if norm else _largest(real, device)
    total = torch.linalg.vector_norm(sizes) if norm else sizes.amax()
    halves = [grad for grad in real if grad.dtype == torch.float16]
    return Measured(sizes, total, _largest(halves, device).amax() if halves else None)


@torch.no_grad()
def share_above(gradients: Sequence[Tensor], edge: Tensor, device: torch.device) -> Tensor:
    """Returns the share of all gradient elements whose magnitude is above `edge`; inf and NaN are.

    Complex elements count as two. Reads each gradient once and makes temporaries as large as the largest of them.
    """
    real = [as_real(grad) if grad.is_complex() else grad for grad in gradients]
    # Compared in float32: a narrower type would round the edge.
    wide = (grad.float() if grad.dtype.itemsize < 4 else grad for grad in real)
    above = [(~(grad.abs() <= edge.to(grad.device))).sum().to(device, torch.float32) for grad in wide]
    elements = sum(grad.numel() for grad in real)
    return torch.stack(above).sum() / max(1, elements) if above else torch.zeros_like(edge)


def as_real(grad: Tensor) -> Tensor:
    """Returns the two parts of a complex gradient as one real view; of a conjugate, the parts of what it is a view of.

    Size, finiteness and multiplying by a real number are the same for both.
    """
    return torch.view_as_real(grad.conj() if grad.is_conj() else grad)


def _norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns the norm of each gradient: a `dot` for a large flat float32 tensor, a multi-tensor norm for the rest."""
    norms: list[Tensor | None] = [None] * len(gradients)
    rest: dict[torch.device, list[int]] = {}
    for index, grad in enumerate(gradients):
        if grad.dtype == torch.float64:
            norms[index] = torch.linalg.vector_norm(grad)
        elif grad.numel() >= DOT_FROM and grad.dtype == torch.float32 and grad.is_contiguous() and grad.is_cpu:
            flat = grad.view(-1)
            norms[index] = torch.dot(flat, flat).sqrt_()
        else:
            rest.setdefault(grad.device, []).append(index)
    for indices in rest.values():
        together = torch._foreach_norm([gradients[index] for index in indices], 2, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        for index, value in zip(indices, together, strict=True):
            norms[index] = value
    return [value for value in norms if value is not None]


def _largest(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the largest magnitude in each gradient, as one float32 vector on `device`; NaN where there is one."""
    lows, highs = zip(*map(_extremes, gradients), strict=True)
    return torch.maximum(_gathered(highs, device).abs(), _gathered(lows, device).abs())


def _extremes(grad: Tensor) -> tuple[Tensor, Tensor]:
    if grad.numel() == 0:
        nothing = torch.zeros((), device=grad.device)
        return nothing, nothing
    low, high = torch.aminmax(grad)
    return low, high


def _gathered(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns 0-d tensors of any type and device as one float32 vector on `device`, in order."""
    same = all(value.device == device and value.dtype == torch.float32 for value in values)
    return torch.stack(list(values) if same else [value.to(device, torch.float32) for value in values])
