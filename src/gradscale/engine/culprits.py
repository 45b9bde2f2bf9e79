"""The parameters whose gradients were not finite, found from one number for each gradient."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gradscale._chunks import chunks


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

    `sizes` has one number for each gradient, inf or NaN where it holds one, or is empty if nothing was checked.
    `counts` may be empty too.
    """
    known = [*counts, *[None] * (len(names) - len(counts))]
    return [
        Culprit(name, "nan" if math.isnan(size) else "inf", count)
        for name, size, count in zip(names, sizes, known, strict=False)
        if not math.isfinite(size)
    ]


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is what is counted
def count_nonfinite(array: np.ndarray[Any, Any], factor: float, dtype: Any = np.float32) -> int:
    """Returns how many elements are not finite before or after they are multiplied by `factor` and cast to `dtype`."""
    return sum(int(np.count_nonzero(~np.isfinite((chunk * factor).astype(dtype)))) for chunk in chunks(array))
