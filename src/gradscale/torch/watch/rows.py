"""Rows of what was recorded: numbers of one tensor at one step, and what formats lose of them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from gradscale._table import text_table
from gradscale.formats import FloatArray, Format
from gradscale.histogram.counts import EXPONENTS, ExponentHistogram
from gradscale.histogram.losses import Losses, losses
from gradscale.torch.watch.tally import Key, Kind, Tally


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


@dataclass(frozen=True, slots=True)
class Sample:
    """What was recorded at one step, in little memory: only the bins from the lowest to the highest in use.

    Attributes:
        facts: keys, amax, types, scales and numbers outside of the bins, as they are in a `Tally`.
        first: the first bin in use.
        counts: the bins in use, a row for each tally.
    """

    facts: Sequence[tuple[Any, ...]]
    first: int
    counts: FloatArray

    @classmethod
    def of(cls, tallies: Mapping[Key, Tally]) -> "Sample":
        counts = np.stack([NOTHING, *(tally.histogram.counts for tally in tallies.values())])
        used = np.flatnonzero(counts.any(axis=0))
        first, end = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 0)
        facts = [
            (key, each.amax, each.dtype, each.scale, each.histogram.zeros, each.histogram.infs, each.histogram.nans)
            for key, each in tallies.items()
        ]
        return cls(facts, first, counts[1:, first:end].copy())

    def rows(self, step: int, formats: Sequence[Format]) -> Iterator[WatchRow]:
        """Yields a row for each tensor."""
        for (key, amax, dtype, scale, *outside), own in zip(self.facts, self.counts, strict=True):
            counts = NOTHING.copy()
            counts[self.first : self.first + len(own)] = own
            yield _row(step, key, Tally(ExponentHistogram(counts, *outside), amax, dtype, scale), formats)


NOTHING = np.zeros(EXPONENTS.size, np.int64)
"""Bins without an element."""


def _row(step: int, key: Key, tally: Tally, formats: Sequence[Format]) -> WatchRow:
    histogram = tally.histogram
    zeros, infs, nans = (int(number) for number in (histogram.zeros, histogram.infs, histogram.nans))
    elements = histogram.nonzero + zeros + infs + nans
    return WatchRow(
        step=step,
        name=key[0],
        kind=key[1],
        dtype=str(tally.dtype).removeprefix("torch."),
        scale=tally.scale,
        elements=elements,
        amax=tally.amax,
        smallest=2.0**histogram.lowest if histogram.nonzero else math.nan,
        range_bits=histogram.highest - histogram.lowest + 1 if histogram.nonzero else 0,
        zeros=zeros / max(1, elements),
        infs=infs,
        nans=nans,
        formats={format.name: losses(histogram, format, tally.scale) for format in formats},
    )


def rows_table(rows: Iterable[WatchRow], format: Format) -> str:
    """Returns rows as a table of text, with what one format loses."""
    columns = ("step", "tensor", "kind", "scale", "amax", "smallest", "bits", "zeros", "inf, NaN")
    return text_table(
        (*columns, f"{format.name} flushed", "subnormal", "overflow", "SNR dB"),
        [(*_cells(row), *_format_cells(row.formats[format.name])) for row in rows],
    )


def _cells(row: WatchRow) -> tuple[str, ...]:
    return (
        str(row.step),
        row.name,
        row.kind,
        f"{row.scale:g}",
        f"{row.amax:.1e}",
        f"{row.smallest:.1e}",
        str(row.range_bits),
        f"{row.zeros:.1%}",
        str(row.infs + row.nans),
    )


def _format_cells(found: Losses) -> tuple[str, ...]:
    return (f"{found.flushed:.2%}", f"{found.subnormal:.2%}", f"{found.overflow:.2%}", f"{found.snr_db:.1f}")
