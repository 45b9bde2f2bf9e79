"""What a cast to FP16 does to the weights of one tensor."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradscale._chunks import chunks
from gradscale.formats import FP16

FLUSHED = 0.01
"""Share of nonzero weights that become zero, above which a tensor is at risk."""

SUBNORMAL = 0.1
"""Share of nonzero weights that keep fewer digits, above which a tensor is at risk."""

CLOSE_BITS = 3.0
"""Powers of two between the largest weight and the largest FP16 number, below which a tensor is at risk: products with
activations above 8 overflow."""


@dataclass(frozen=True, slots=True)
class Survival:
    """What FP16 keeps of a tensor.

    Attributes:
        name: of the tensor.
        elements: how many numbers it has.
        amax: the largest finite magnitude.
        nonfinite: numbers that are inf or NaN already.
        overflowed: finite numbers that become inf.
        flushed: nonzero numbers that become zero.
        subnormal: nonzero numbers that keep fewer digits than FP16 has.
        nonzero: finite numbers that are not zero.
    """

    name: str
    elements: int
    amax: float
    nonfinite: int
    overflowed: int
    flushed: int
    subnormal: int
    nonzero: int

    @property
    def flushed_share(self) -> float:
        """Share of the nonzero numbers that become zero."""
        return self.flushed / max(1, self.nonzero)

    @property
    def subnormal_share(self) -> float:
        """Share of the nonzero numbers that keep fewer digits."""
        return self.subnormal / max(1, self.nonzero)

    @property
    def fails(self) -> bool:
        """Whether a number is inf or NaN after the cast."""
        return bool(self.nonfinite or self.overflowed)

    @property
    def risk(self) -> str:
        """What is wrong, or may go wrong, in a few words; empty if nothing."""
        if self.nonfinite:
            return f"{self.nonfinite:,} inf or NaN already"
        if self.overflowed:
            return f"{self.overflowed:,} above {FP16.max:.0f} become inf"
        if self.amax and math.log2(FP16.max / self.amax) < CLOSE_BITS:
            return "close to the largest number: products overflow"
        if self.flushed_share > FLUSHED:
            return f"{self.flushed_share:.1%} become zero"
        if self.subnormal_share > SUBNORMAL:
            return f"{self.subnormal_share:.1%} lose digits"
        return ""


@np.errstate(over="ignore", invalid="ignore")  # what does not fit is what is counted
def survival(name: str, array: np.ndarray[Any, Any]) -> Survival:
    """Returns what FP16 keeps of a tensor. Reads it once, in pieces."""
    amax, counts = 0.0, np.zeros(5, np.int64)
    for chunk in chunks(array):
        finite = np.isfinite(chunk)
        sizes = np.abs(chunk[finite])
        cast = sizes.astype(np.float16)
        amax = max(amax, float(sizes.max(initial=0.0)))
        there = sizes > 0
        counts += [
            int((~finite).sum()),
            int(np.isinf(cast).sum()),
            int((there & (cast == 0)).sum()),
            int(((cast > 0) & (cast < FP16.smallest_normal)).sum()),
            int(there.sum()),
        ]
    return Survival(name, array.size, amax, *map(int, counts))
