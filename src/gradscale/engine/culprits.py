"""The parameters whose gradients were not finite, found from one number for each gradient."""

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
        count: elements that were not finite; None where they were not counted.
    """

    name: str
    kind: Literal["inf", "nan"]
    count: int | None = None


def culprits_of(names: Sequence[str], sizes: Sequence[float], counts: Sequence[int | None] = ()) -> list[Culprit]:
    """Returns the parameters whose gradients were not finite, in their order.

    Args:
        names: what the parameters are called.
        sizes: one number for each gradient, inf or NaN where it holds one; none at all if nothing was checked.
        counts: elements of each gradient that are not finite, where they were counted.
    """
    known = [*counts, *[None] * (len(names) - len(counts))]
    return [
        Culprit(name, "nan" if math.isnan(size) else "inf", count)
        for name, size, count in zip(names, sizes, known, strict=False)
        if not math.isfinite(size)
    ]
