"""Room one, measure: a single read of the gradients that says whether they are finite, how large, and which are not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradscale.formats import FP16
from gradscale.kernels.torch import DOT_FROM, largest, norms, share_above
from gradscale.record import Array

__all__ = ["DOT_FROM", "Measured", "all_finite", "measure", "share_above"]

HALF = (torch.float16, torch.complex32)
"""Types that are divided in FP16."""


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
    sizes = norms(gradients, device) if norm else largest(gradients, device)
    if not gradients:
        return Measured(sizes, sizes.sum(), None)
    total = torch.linalg.vector_norm(sizes) if norm else sizes.amax()
    halves = [grad for grad in gradients if grad.dtype in HALF] if half else []
    return Measured(sizes, total, largest(halves, device).amax() if halves else None)
