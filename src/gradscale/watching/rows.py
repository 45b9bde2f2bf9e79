"""What was recorded of the tensors of a step, and rows of it: their numbers, and what formats lose of them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple

import numpy as np

from gradscale._table import text_table
from gradscale.formats import Format
from gradscale.histogram.counts import ExponentHistogram
from gradscale.histogram.losses import Losses, losses
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE

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


@dataclass(frozen=True, slots=True)
class WatchRow:
    """One tensor of a model at one sampled step.

    Attributes:
        step: the step, counted from 0.
        name: of the module, or of the parameter for a weight and its gradient.
        kind: `"weight"`, `"input"`, `"output"`, `"output_grad"` or `"weight_grad"`.
        dtype: the type that the tensor had.
        scale: what gradients were multiplied by in the backward pass; 1 for other tensors. All numbers here are
            those of unscaled gradients.
        elements: how many numbers it has, of all micro-batches together.
        amax: the largest magnitude; NaN where there is one.
        smallest: the smallest magnitude above zero, rounded down to a power of two; NaN where there is none.
        range_bits: powers of two from the smallest to the largest, both included.
        zeros: share of elements that are zero.
        infs: elements that are inf.
        nans: elements that are NaN.
        formats: what each format loses of the nonzero elements, by its name. Gradients are multiplied by the scale
            first, weights and activations by nothing.
    """

    step: int
    name: str
    kind: Kind
    dtype: str
    scale: float
    elements: int
    amax: float
    smallest: float
    range_bits: int
    zeros: float
    infs: int
    nans: int
    formats: Mapping[str, Losses]

    def to_dict(self) -> dict[str, Any]:
        """Returns a flat dict of plain values, with keys as in `fp16_flushed` for the formats."""
        flat = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "formats"}
        for name, found in self.formats.items():
            flat |= {f"{name.lower()}_{key}": value for key, value in asdict(found).items()}
        return flat


def rows_of(sample: Sample, step: int, formats: Sequence[Format]) -> Iterator[WatchRow]:
    """Yields a row for each tensor of a sample."""
    for (name, kind), (histogram, amax, dtype, scale) in sample.items():
        zeros, infs, nans = (int(number) for number in (histogram.zeros, histogram.infs, histogram.nans))
        elements = histogram.nonzero + zeros + infs + nans
        # torch's own scaler goes to 0 and to inf. At the bounds, too, all is flushed or overflows.
        within = min(max(scale, LOWEST_SCALE), HIGHEST_SCALE)
        yield WatchRow(
            step=step,
            name=name,
            kind=kind,
            dtype=str(dtype).removeprefix("torch."),
            scale=scale,
            elements=elements,
            amax=amax,
            smallest=2.0**histogram.lowest if histogram.nonzero else math.nan,
            range_bits=histogram.highest - histogram.lowest + 1 if histogram.nonzero else 0,
            zeros=zeros / max(1, elements),
            infs=infs,
            nans=nans,
            formats={format.name: losses(histogram, format, within) for format in formats},
        )


def rows_table(rows: Iterable[WatchRow], format: Format) -> str:
    """Returns rows as a table of text, with what one format loses."""
    columns = ("step", "tensor", "kind", "scale", "amax", "smallest", "bits", "zeros", "inf, NaN")
    lines: list[tuple[str, ...]] = []
    for row in rows:
        found, numbers = row.formats[format.name], (f"{row.scale:g}", f"{row.amax:.1e}", f"{row.smallest:.1e}")
        counts = (str(row.range_bits), f"{row.zeros:.1%}", str(row.infs + row.nans))
        lost = (f"{found.flushed:.2%}", f"{found.subnormal:.2%}", f"{found.overflow:.2%}", f"{found.snr_db:.1f}")
        lines.append((str(row.step), row.name, row.kind, *numbers, *counts, *lost))
    names = (*columns, f"{format.name} flushed", "subnormal", "overflow", "SNR dB")
    return text_table(names, lines, whole=("tensor", "kind"))
