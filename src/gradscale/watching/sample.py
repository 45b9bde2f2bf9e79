"""What was recorded at one step, in little memory."""

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from gradscale.formats import FloatArray
from gradscale.histogram.counts import EXPONENTS, LOWEST_EXPONENT, ExponentHistogram
from gradscale.record import plain

Kind = Literal["weight", "input", "output", "output_grad", "weight_grad"]

KINDS: tuple[Kind, ...] = ("weight", "input", "output", "output_grad", "weight_grad")

MODEL = "(model)"
"""The name of the whole model, which frameworks call by the empty string."""

OUTSIDE = ("zeros", "infs", "nans")
"""What is counted outside of the bins."""

Key = tuple[str, Kind]
"""Name of a module or a parameter, and what was recorded of it."""


class Counts(NamedTuple):
    """What was counted of tensors, in rows, in host memory.

    Attributes:
        bins: elements in each bin of `gradscale.histogram.EXPONENTS`.
        outside: elements that are zero, inf and NaN.
        amax: the largest magnitude; NaN where there is one.
    """

    bins: FloatArray
    outside: FloatArray
    amax: FloatArray


class Tally(NamedTuple):
    """The numbers of one tensor of a model, of all forward and backward passes of a step together.

    Attributes:
        name: of the module, or of the parameter.
        kind: what was recorded of it.
        histogram: the numbers; gradients are unscaled.
        amax: the largest magnitude; NaN where there is one.
        dtype: the type that the tensor had.
        scale: what gradients were multiplied by when they were recorded; 1 for other tensors.
    """

    name: str
    kind: Kind
    histogram: ExponentHistogram
    amax: float
    dtype: Any
    scale: float

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values that go through JSON, with the counts from the lowest to the highest bin in use."""
        counts = np.trim_zeros(self.histogram.host_counts, "b")
        named = {"name": self.name, "kind": self.kind, "dtype": str(self.dtype).removeprefix("torch.")}
        numbers = {"amax": plain(self.amax), "scale": plain(self.scale)}
        outside = {name: int(getattr(self.histogram, name)) for name in OUTSIDE}
        used = np.trim_zeros(counts, "f")
        return {
            **named,
            **numbers,
            **outside,
            "first": len(counts) - len(used) + LOWEST_EXPONENT,
            "counts": used.tolist(),
        }

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Self:
        """Returns what `to_dict` wrote. The type is its name."""
        counts = np.zeros(EXPONENTS.size, np.int64)
        first = mapping["first"] - LOWEST_EXPONENT
        counts[first : first + len(mapping["counts"])] = mapping["counts"]
        histogram = ExponentHistogram(counts, *(np.int64(mapping[name]) for name in OUTSIDE))
        amax, scale = float(mapping["amax"]), float(mapping["scale"])
        return cls(mapping["name"], mapping["kind"], histogram, amax, mapping["dtype"], scale)


class Sample:
    """The tensors of one step: first which of them there are, then what was counted of them.

    Attributes:
        slots: which of the counted tensors belong to each key.
        dtypes: the type of each tensor, as its framework writes it.
        scales: what each tensor was multiplied by in the backward pass.
    """

    def __init__(self) -> None:
        self.slots: dict[Key, list[int]] = {}
        self.dtypes: list[Any] = []
        self.scales: list[float] = []

    def add(self, key: Key, dtype: Any, scale: float = 1.0) -> int:
        """Adds a tensor, and returns its position. Those of one key are one row."""
        self.dtypes.append(dtype)
        self.scales.append(scale)
        self.slots.setdefault(key, []).append(len(self.dtypes) - 1)
        return len(self.dtypes) - 1

    def keep(self, counts: Counts) -> "Sample":
        """Keeps what was counted of all tensors, unscaled: only the bins from the lowest to the highest in use."""
        used = np.flatnonzero(counts.bins.any(axis=0))
        self._first, end = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 0)
        self._counts = counts._replace(bins=counts.bins[:, self._first : end].copy())
        return self

    def tallies(self) -> Iterator[Tally]:
        """Yields the numbers of each key. The type and the scale are those of the last of its tensors."""
        for (name, kind), slots in self.slots.items():
            histogram = reduce(ExponentHistogram.__add__, map(self._histogram, slots))
            amax = float(np.max(self._counts.amax[slots]))  # NaN if one is
            yield Tally(name, kind, histogram, amax, self.dtypes[slots[-1]], self.scales[slots[-1]])

    def _histogram(self, slot: int) -> ExponentHistogram:
        bins, counts = self._counts.bins[slot], np.zeros(EXPONENTS.size, np.int64)
        counts[self._first : self._first + len(bins)] = bins
        return ExponentHistogram(counts, *self._counts.outside[slot])
