"""The best static scale for the histograms of gradients, and the layers of a model that it does not serve."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any

from gradscale._table import text_table
from gradscale.formats import FP16, FP32, FloatArray, Format, get_format
from gradscale.histogram.counts import ExponentHistogram, exponent_histogram
from gradscale.histogram.losses import Losses, losses
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE, check_number

TOLERANCE = 0.01
"""Share of nonzero gradients of a layer that may be flushed to zero before it counts as not served."""

LISTED_BITS = 12
"""Powers of two below and above the best scale whose losses are listed, and down to a scale of 1."""

SHOWN = 8
"""Scales in the text: no scale, in four steps up to the best one, and three above it."""

LEGEND = (
    "Shares are of the nonzero elements. flushed: become zero. subnormal: keep fewer digits. overflow: too large for "
    "the format. energy: share of the sum of squares that is flushed. SNR: signal to rounding noise; 6 dB are one bit. "
    "bits: powers of two from the smallest to the largest. own: the best scale of that gradient alone."
)
"""What the columns of both tables are."""


@dataclass(frozen=True, slots=True)
class ScaleLosses:
    """What all gradients together lose at one scale.

    Attributes:
        scale: the scale.
        losses: what is lost of them.
    """

    scale: float
    losses: Losses


@dataclass(frozen=True, slots=True)
class LayerCalibration:
    """The gradients of one tensor.

    Attributes:
        name: what it is the gradient of.
        own_scale: the best scale if it were alone; None where every gradient is zero.
        range_bits: powers of two from its smallest to its largest gradient.
        losses: what is lost of it at the scale of the whole model.
        own_losses: what would be lost at its own best scale.
        advice: what to do if the scale of the model does not serve it; empty where it does.
    """

    name: str
    own_scale: float | None
    range_bits: int
    losses: Losses
    own_losses: Losses
    advice: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """The best static scale for a model, and what is lost at others.

    Attributes:
        format: the format that the gradients pass through.
        scale: the largest power of two at which no gradient overflows, even if they grow by the margin. At most 1 for a
            format with the range of float32, which needs no scale.
        safe_bits: how many times the gradients may double at that scale before they overflow.
        at: what is lost at this and other scales, in order; 1 is one of them.
        lossy: how many of the gradients lose more than 1% of their nonzero elements without a scale.
        layers: the gradients one by one, those that lose most first.
    """

    format: Format
    scale: float
    safe_bits: int
    at: Sequence[ScaleLosses]
    lossy: int
    layers: Sequence[LayerCalibration]

    @property
    def losses(self) -> Losses:
        """What is lost of all gradients together at the best scale."""
        return self._at(self.scale)

    def _at(self, scale: float) -> Losses:
        return next(each.losses for each in self.at if each.scale == scale)

    @property
    def needs_scale(self) -> bool:
        """Whether gradients overflow without a scale, or more than 1% of all or of one become zero."""
        without = self._at(1.0)
        return without.overflow > 0 or without.flushed > TOLERANCE or self.lossy > 0

    @property
    def answer(self) -> str:
        """Whether a scale is needed at all, in words."""
        name, without, best = self.format.name, self._at(1.0), _power(self.scale)
        if _is_wide(self.format) and not without.overflow:
            return f"{name} has the range of float32: it needs no loss scaling."
        share = f"without a scale {without.flushed:.2%} of the gradients become zero in {name}"
        if without.overflow:
            return (
                f"A scale is needed: without one {without.overflow:.2%} of the gradients overflow {name}. Use {best}."
            )
        if not self.needs_scale:
            return f"No scale is needed for these batches: {share}, and nowhere more than {TOLERANCE:.0%}."
        where = f", and more than {TOLERANCE:.0%} of {self.lossy} of the {len(self.layers)} measured tensors"
        return f"A scale is needed: {share}{where}. At {best}, {self.losses.flushed:.2%} do."

    @property
    def shown(self) -> Sequence[ScaleLosses]:
        """Eight scales: 1, which is no scale, in steps to the best one, and beyond."""
        best = round(math.log2(self.scale))
        beyond = -1 if best < 0 else 1
        bits = list(dict.fromkeys(round(best * step / 4) for step in range(5)))
        bits += [best + beyond * 2 * step for step in range(1, SHOWN - len(bits) + 1)]
        return [
            ScaleLosses(2.0**each, self._at(2.0**each))
            for each in bits
            if any(one.scale == 2.0**each for one in self.at)
        ]

    @property
    def unserved(self) -> Sequence[LayerCalibration]:
        """The layers of which too much is lost at the best scale."""
        return [layer for layer in self.layers if layer.advice]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain values."""
        return asdict(self) | {"format": self.format.name}

    def __str__(self) -> str:
        """Returns the scales and the layers as text."""
        scales = text_table(
            ("scale", "flushed", "subnormal", "overflow", "energy flushed", "SNR dB"),
            [_scale_cells(each, best=each.scale == self.scale) for each in self.shown],
        )
        layers = text_table(
            ("gradient of", "own scale", "bits", "flushed", "subnormal", "advice"),
            [_cells(each) for each in self.layers],
        )
        summary = f"{self.format.name}: scale {self.scale:g}, {self.safe_bits} bits below overflow"
        return f"{self.answer}\n{summary}\n\n{scales}\n{layers}\n{LEGEND}"


def best_static_scale(
    source: ExponentHistogram | FloatArray | Iterable[FloatArray],
    format: Format | str = FP16,
    margin_bits: float = 2,
) -> float:
    """Returns the largest power of two at which gradients like these do not overflow, even if they grow by the margin.

    The largest loses the least to zero, and a power of two changes no digit of a normal number. It follows from the
    upper end of the highest bin that is not empty, and so does not depend on how the elements are distributed in it.

    Args:
        source: the histogram of unscaled gradients, best of a whole run in float32, or arrays of them. Include the
            gradients of activations: they pass through the format too.
        format: the format that the gradients pass through.
        margin_bits: how many times the gradients may double before they overflow.

    >>> import numpy as np
    >>> best_static_scale(np.float32([0.9, 1e-7]), margin_bits=3)
    4096.0

    Raises:
        ValueError: every element is zero, or one is inf or NaN, or the margin is negative.
    """
    check_number("margin_bits", margin_bits)
    if not 0 <= margin_bits < math.inf:
        raise ValueError(f"`margin_bits` must not be negative. Received: margin_bits={margin_bits!r}.")
    histogram = source if isinstance(source, ExponentHistogram) else exponent_histogram(source)
    if nonfinite := int(histogram.nonfinite):
        raise ValueError(
            "The gradients must be finite, or the largest is not known. "
            f"Received: {nonfinite} elements that are inf or NaN. Measure them at a lower scale."
        )
    bits = math.log2(get_format(format).max) - (histogram.highest + 1) - margin_bits
    return min(max(2.0 ** math.floor(bits), LOWEST_SCALE), HIGHEST_SCALE)


def safe_bits(histogram: ExponentHistogram, format: Format | str = FP16, scale: float = 1.0) -> int:
    """Returns how many times the elements may double, at `scale`, before the largest could overflow.

    By the upper end of the highest bin, as in `best_static_scale`. Negative where elements may overflow as they are.

    >>> import numpy as np
    >>> safe_bits(exponent_histogram(np.float32([0.9])), FP16, scale=4096.0)
    3
    """
    return math.floor(math.log2(get_format(format).max) - (histogram.highest + 1) - math.log2(scale))


def calibration_of(
    histograms: Mapping[str, ExponentHistogram], format: Format | str = FP16, margin_bits: float = 2
) -> Calibration:
    """Returns the calibration of gradients by the histograms of the unscaled ones, by name.

    >>> import numpy as np
    >>> from gradscale.histogram import exponent_histogram
    >>> found = calibration_of({"w": exponent_histogram(np.float32([0.5, 1e-3]))})
    >>> found.scale, found.safe_bits, found.losses.flushed
    (8192.0, 2, 0.0)

    Raises:
        ValueError: every gradient is zero, or one is inf or NaN, or the margin is negative.
    """
    limits = get_format(format)
    total = reduce(ExponentHistogram.__add__, histograms.values())
    if not total.nonzero and not int(total.nonfinite):
        raise ValueError(
            f"Calibration needs a gradient that is not zero. Received: {len(histograms)} gradients that are all zero. "
            "Look whether the loss depends on the parameters, and whether it is too small even for float32."
        )
    scale = _best_scale(total, limits, margin_bits)
    best = round(math.log2(scale))
    listed = (2.0**bits for bits in range(min(best - LISTED_BITS, 0), max(best + LISTED_BITS, 0) + 1))
    alone = [losses(each, limits, 1.0) for each in histograms.values()]
    return Calibration(
        limits,
        scale,
        safe_bits(total, limits, scale),
        [ScaleLosses(each, losses(total, limits, each)) for each in listed if LOWEST_SCALE <= each <= HIGHEST_SCALE],
        sum(each.flushed > TOLERANCE for each in alone),
        sorted(
            (_layer(name, histogram, limits, scale, margin_bits) for name, histogram in histograms.items()),
            key=lambda layer: -layer.losses.flushed,
        ),
    )


def add_batch(found: dict[str, ExponentHistogram], histograms: Mapping[str, ExponentHistogram], batch: int) -> None:
    """Adds the gradients of a batch, counted from 0, to those of the batches before, by name.

    Raises:
        ValueError: one is inf or NaN, of which no scale could be the cause in float32.
    """
    if wrong := [name for name, histogram in histograms.items() if int(histogram.nonfinite)]:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            "Gradients must be finite in float32, or the largest is not known. Received: inf or NaN in batch "
            f"{batch}, counted from 0, in the gradients of {', '.join(wrong[:3])}{more}. Look at this batch and its "
            "loss, or leave it out."
        )
    for name, histogram in histograms.items():
        found[name] = found[name] + histogram if name in found else histogram


def _power(scale: float) -> str:
    return f"2^{math.frexp(scale)[1] - 1}"


def _is_wide(format: Format) -> bool:
    """Returns whether a format has the range of float32, as BF16 has: what fits there fits as it is."""
    return format.smallest_normal <= FP32.smallest_normal


def _best_scale(histogram: ExponentHistogram, limits: Format, margin_bits: float) -> float:
    best = best_static_scale(histogram, limits, margin_bits)
    return min(best, 1.0) if _is_wide(limits) else best


def _layer(
    name: str, histogram: ExponentHistogram, limits: Format, scale: float, margin_bits: float
) -> LayerCalibration:
    found = losses(histogram, limits, scale)
    if not histogram.nonzero:
        return LayerCalibration(name, None, 0, found, found, "")
    own_scale = _best_scale(histogram, limits, margin_bits)
    own = losses(histogram, limits, own_scale)
    return LayerCalibration(
        name,
        own_scale,
        histogram.highest - histogram.lowest + 1,
        found,
        own,
        _advice(found, own, own_scale / scale),
    )


def _advice(found: Losses, own: Losses, ratio: float) -> str:
    if found.flushed <= TOLERANCE:
        return ""
    if own.flushed <= TOLERANCE:
        return f"keep it in float32, or multiply its gradient by up to 2^{math.frexp(ratio)[1] - 1} more"
    return "keep it in float32: no scale fits its range"


def _scale_cells(each: ScaleLosses, *, best: bool) -> tuple[str, ...]:
    found = each.losses
    shares = (found.flushed, found.subnormal, found.overflow, found.flushed_energy)
    return (
        f"{_power(each.scale)}{' (best)' if best else ''}",
        *(f"{share:.2%}" for share in shares),
        f"{found.snr_db:.1f}",
    )


def _cells(layer: LayerCalibration) -> tuple[str, ...]:
    own = "none" if layer.own_scale is None else _power(layer.own_scale)
    found = layer.losses
    return (layer.name, own, str(layer.range_bits), f"{found.flushed:.2%}", f"{found.subnormal:.2%}", layer.advice)
