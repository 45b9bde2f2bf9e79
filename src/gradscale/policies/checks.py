"""Checks of the settings of a policy. Those that take the policy itself also set what they rounded."""

from typing import TYPE_CHECKING, Any

import numpy as np

from gradscale.formats import FP16, Format, get_format

LOWEST_SCALE = 2.0**-126
HIGHEST_SCALE = 2.0**126
"""Bounds of every scale. Both ends and their reciprocals are normal float32 numbers, which no device flushes to 0."""

USELESS_SCALE = 2.0**-24
"""Where no lower scale helps: a gradient that overflows FP16 here is above 65504 * 2**24, or 1e12, unscaled. It is the
default of `min_scale` where the scale follows the gradients."""

HIGHEST_PEAK = 2.0**48
"""Bound of a scaled gradient, for formats as wide as BF16: the squares of 2**30 gradients still add up to less than
2**128, so the norm is finite in float32. Far below, at 2**-126, nothing is lost yet."""

SMALLEST_GRADIENT = 2.0**-126
"""Anything below counts as zero: some devices flush float32 subnormals, and no rule may depend on the device."""

MOST_BITS = 15
"""Bound of a setting in bits: `two_to` is exact up to here."""


def check_number(name: str, value: float) -> None:
    """Raises if `value` is not a real number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"`{name}` must be a number. Received: {name}={value!r} ({type(value).__name__}).")


def as_single(name: str, value: float) -> float:
    """Returns `value` rounded to float32, or infinity where it is too large; raises if it is not a number.

    Every framework holds the settings in float32. Rounded once, here, they mean the same on all of them and in a
    product of two settings, which Python would otherwise compute in float64.
    """
    check_number(name, value)
    with np.errstate(over="ignore"):
        # The bounds keep a Python integer that does not fit float64 from raising OverflowError.
        return float(np.float32(max(min(value, 2.0**128), -(2.0**128))))


def check_scale(name: str, value: float) -> None:
    """Raises if `value` cannot be a scale."""
    check_number(name, value)
    if not LOWEST_SCALE <= value <= HIGHEST_SCALE:
        raise ValueError(
            f"`{name}` must lie between 2**-126 and 2**126, where it and its reciprocal are normal float32 numbers. "
            f"Received: {name}={value!r}."
        )


def check_count(name: str, value: int) -> None:
    """Raises if `value` is not an integer from 1 to the largest int32."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r} ({type(value).__name__}).")
    if not 1 <= value <= np.iinfo(np.int32).max:
        raise ValueError(f"`{name}` must be between 1 and 2**31 - 1. Received: {name}={value!r}.")


def check_counts(policy: Any, *names: str) -> None:
    """Raises unless the settings are integers from 1 to the largest int32; converts them to Python's int."""
    for name in names:
        check_count(name, getattr(policy, name))
        object.__setattr__(policy, name, int(getattr(policy, name)))


def check_bounds(policy: Any) -> None:
    """Raises unless `min_scale <= init_scale <= max_scale`; rounds the bounds inwards to float32.

    A framework would round a bound that float32 cannot hold, possibly outwards, and the scale could then be slightly
    outside the bounds the user gave.
    """
    for name in ("init_scale", "min_scale", "max_scale"):
        check_scale(name, getattr(policy, name))
    if not policy.min_scale <= policy.init_scale <= policy.max_scale:
        raise ValueError(
            "`init_scale` must lie between `min_scale` and `max_scale`. Received: "
            f"min_scale={policy.min_scale!r}, init_scale={policy.init_scale!r}, max_scale={policy.max_scale!r}."
        )
    # `np.float32` rounds to nearest, so one step back is enough.
    low = np.float32(policy.min_scale)
    high = np.float32(policy.max_scale)
    low = np.nextafter(low, np.float32(np.inf)) if float(low) < policy.min_scale else low
    high = np.nextafter(high, np.float32(0)) if float(high) > policy.max_scale else high
    if low > high:
        raise ValueError(
            "There must be a float32 number between `min_scale` and `max_scale`. Received: "
            f"min_scale={policy.min_scale!r}, max_scale={policy.max_scale!r}."
        )
    object.__setattr__(policy, "min_scale", float(low))
    object.__setattr__(policy, "max_scale", float(high))
    object.__setattr__(policy, "init_scale", float(np.clip(np.float32(policy.init_scale), low, high)))


if TYPE_CHECKING:

    class FormatField:
        """A setting that is given as a format, its name or a dtype, and read as a format."""

        def __get__(self, instance: Any, owner: Any) -> Format: ...
        def __set__(self, instance: Any, value: Format | str) -> None: ...
else:
    FormatField = Format

FORMAT_FP16: Any = FP16
"""The default of such a setting."""


def check_format(policy: Any) -> None:
    """Sets `policy.format` to the format that its name or dtype means; raises if there is none."""
    object.__setattr__(policy, "format", get_format(policy.format))


def check_bits(policy: Any, *names: str) -> None:
    """Raises unless the settings are whole numbers from 0 to 15; converts them to floats.

    Only for whole numbers is 2**bits, and with it the scale, the same on every framework.
    """
    for name in names:
        bits = as_single(name, getattr(policy, name))
        if not (0 <= bits <= MOST_BITS and bits.is_integer()):
            raise ValueError(
                f"`{name}` must be a whole number from 0 to {MOST_BITS}. Received: {name}={getattr(policy, name)!r}."
            )
        object.__setattr__(policy, name, bits)


def check_share(policy: Any, *names: str, below: float = 1.0) -> None:
    """Raises unless the settings are at least 0 and less than `below`; rounds them to float32."""
    for name in names:
        share = as_single(name, getattr(policy, name))
        if not 0 <= share < below:
            raise ValueError(
                f"`{name}` must be at least 0 and below {below:g}. Received: {name}={getattr(policy, name)!r}."
            )
        object.__setattr__(policy, name, share)
