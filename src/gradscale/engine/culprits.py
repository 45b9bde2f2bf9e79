"""Who was to blame: a parameter whose gradient was not finite, found from one number for each gradient."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Culprit:
    """A parameter whose gradient was not finite.

    Attributes:
        name: its path in the model, as in `encoder.0.weight` or `dense/kernel`.
        kind: `"nan"` if the gradient held a NaN, else `"inf"`.
    """

    name: str
    kind: Literal["inf", "nan"]


def culprits_of(names: Sequence[str], sizes: Sequence[float]) -> list[Culprit]:
    """Returns the parameters whose gradients were not finite, in their order.

    Args:
        names: what the parameters are called.
        sizes: one number for each gradient, inf or NaN where it holds one; none at all if nothing was checked.
    """
    bad = [(name, size) for name, size in zip(names, sizes, strict=False) if not math.isfinite(size)]
    return [Culprit(name, "nan" if math.isnan(size) else "inf") for name, size in bad]
