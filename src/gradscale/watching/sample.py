"""What was recorded at one step."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np

from gradscale.histogram.counts import ExponentHistogram

Kind = Literal["weight", "input", "output", "output_grad", "weight_grad"]

KINDS: tuple[Kind, ...] = ("weight", "input", "output", "output_grad", "weight_grad")

MODEL = "(model)"
"""The name of the whole model, which frameworks call by the empty string."""

Key = tuple[str, Kind]
"""Name of a module or a parameter, and what was recorded of it."""


class Tally(NamedTuple):
    """The numbers of one tensor of a model, or of several together.

    Attributes:
        histogram: the numbers, in host memory; gradients are unscaled.
        amax: the largest magnitude; NaN where there is one.
        dtype: the type that the tensor had.
        scale: what gradients were multiplied by when they were recorded; 1 for other tensors.
    """

    histogram: ExponentHistogram
    amax: float
    dtype: Any
    scale: float


Sample = dict[Key, Tally]
"""The tensors of one step, those of all forward and backward passes together."""


def sample_of(tallies: Iterable[tuple[Key, Tally]]) -> Sample:
    """Returns tensors by their keys. The type and the scale of a key are those of the last of its tensors."""
    sample: Sample = {}
    for key, tally in tallies:
        if (before := sample.get(key)) is not None:
            amax = float(np.maximum(before.amax, tally.amax))  # NaN if one is
            tally = tally._replace(histogram=before.histogram + tally.histogram, amax=amax)
        sample[key] = tally
    return sample
