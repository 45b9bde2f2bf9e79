"""What was recorded at one step."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NamedTuple

from gradscale.histogram.counts import ExponentHistogram
from gradscale.watching.counted import Counted

Kind = Literal["weight", "input", "output", "output_grad", "weight_grad"]

KINDS: tuple[Kind, ...] = ("weight", "input", "output", "output_grad", "weight_grad")

MODEL = "(model)"
"""The name of the whole model, which frameworks call by the empty string."""

Key = tuple[str, Kind]
"""Name of a module or a parameter, and what was recorded of it."""


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


@dataclass(frozen=True, slots=True)
class Sample:
    """The tensors of one step.

    Attributes:
        slots: which of the counted tensors belong to each key.
        counted: what was counted of them.
    """

    slots: Mapping[Key, Sequence[int]]
    counted: Counted

    def tallies(self) -> Iterator[Tally]:
        """Yields the numbers of each key. The type and the scale are those of the last of its tensors."""
        for (name, kind), slots in self.slots.items():
            histogram = reduce(ExponentHistogram.__add__, map(self.counted.histogram, slots))
            sizes = [self.counted.largest(slot) for slot in slots]
            amax = math.nan if any(map(math.isnan, sizes)) else max(sizes)
            yield Tally(name, kind, histogram, amax, self.counted.dtypes[slots[-1]], self.counted.scales[slots[-1]])
