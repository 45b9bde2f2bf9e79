"""The best static scale for the elements of a histogram."""

import math
from collections.abc import Iterable

from gradscale.formats import FP16, FloatArray, Format, get_format
from gradscale.histogram.counts import ExponentHistogram, exponent_histogram
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE, check_number


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
