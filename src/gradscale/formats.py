"""Number formats: what each can hold, read from numpy and ml_dtypes, and how it rounds."""

import math
from dataclasses import dataclass
from typing import Any, cast

import ml_dtypes
import numpy as np

from gradscale._text import did_you_mean, short

FloatArray = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Format:
    """A floating-point format: its range and its precision.

    Attributes:
        name: short name, as in `FP16`.
        dtype_name: name of the numpy or ml_dtypes type that stores it.
        bits: bits of one stored value.
        mantissa_bits: explicit bits of the mantissa; a normal value has one more.
        max: largest finite value.
        smallest_normal: smallest value with full precision.
        smallest_subnormal: smallest value above zero.
        has_inf: whether overflow becomes infinity. Without it, overflow becomes NaN where there is one, or saturates.
        has_nan: whether the format has a NaN.
    """

    name: str
    dtype_name: str
    bits: int
    mantissa_bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    has_inf: bool
    has_nan: bool

    @property
    def binades(self) -> int:
        """Powers of two between the smallest subnormal and the maximum: the width of the window gradients must fit.

        >>> FP16.binades, BF16.binades
        (40, 261)
        """
        return math.frexp(self.max)[1] - math.frexp(self.smallest_subnormal)[1] + 1

    @property
    def overflow_threshold(self) -> float:
        """Smallest magnitude that rounds past `max`: half the spacing of its largest numbers above it.

        Where the tie goes to `max` instead, because its last bit is even (FP8_E4M3), the float above the tie.

        >>> FP16.overflow_threshold
        65520.0
        """
        last_place = 2.0 ** (math.frexp(self.max)[1] - 1 - self.mantissa_bits)
        tie = self.max + last_place / 2
        return tie if self.max / last_place % 2 else math.nextafter(tie, math.inf)

    def round(self, array: Any) -> FloatArray:
        """Returns `array` rounded to this format (nearest, ties to even), in float32, or float64 where it came so.

        Overflow becomes infinity, NaN or the maximum, as in the format's own type.

        >>> FP16.round([1e-8, 1 / 3, 70000.0]).tolist()
        [0.0, 0.333251953125, inf]
        """
        values = np.asarray(array)
        wide = np.float64 if getattr(array, "dtype", None) == np.float64 else np.float32
        if values.dtype.kind in "biu":
            values = values.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = _round_to_odd(values) if self.mantissa_bits + 2 < 23 else values
            if self == TF32:
                return _round_mantissa(narrow.astype(np.float32), self.mantissa_bits).astype(wide)
            return narrow.astype(np.dtype(self.dtype_name)).astype(wide)


def _round_to_odd(values: FloatArray) -> FloatArray:
    """Returns float64 as float32 rounded to odd, so that a second rounding to 21 bits or less equals a single one."""
    # ml_dtypes casts float64 to its types through float32, which rounds twice. Rounding to odd sets the last bit of an
    # inexact result, so that the second rounding never meets a false tie (Boldo and Melquiond, 2008).
    if values.dtype != np.float64:
        return values
    single = values.astype(np.float32)
    inexact = single.astype(np.float64) != values
    away = np.abs(single.astype(np.float64)) > np.abs(values)
    bits = single.view(np.uint32) if single.ndim else np.atleast_1d(single).view(np.uint32).reshape(())
    truncated = np.where(inexact & away, bits - np.uint32(1), bits)
    return np.where(inexact, truncated | np.uint32(1), truncated).astype(np.uint32).view(np.float32)


def _round_mantissa(values: FloatArray, bits: int) -> FloatArray:
    """Returns float32 rounded to `bits` of mantissa by integer arithmetic on its bit pattern, ties to even."""
    drop = 23 - bits
    pattern = np.atleast_1d(values).view(np.uint32)
    half = np.uint32((1 << (drop - 1)) - 1)
    # Adding half a unit less one, plus the last bit that is kept, carries exactly where round-half-to-even goes up.
    nearest = (pattern + half + ((pattern >> np.uint32(drop)) & np.uint32(1))) & ~np.uint32((1 << drop) - 1)
    rounded = np.where(np.isfinite(np.atleast_1d(values)), nearest, pattern).astype(np.uint32).view(np.float32)
    return rounded.reshape(values.shape)


def _from_dtype(name: str, dtype: Any) -> Format:
    info = cast(Any, ml_dtypes.finfo(dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        past_the_end = float(np.asarray(float(info.max) * 4, np.float64).astype(np.float32).astype(dtype))
    return Format(
        name=name,
        dtype_name=np.dtype(dtype).name,
        bits=int(info.bits),
        mantissa_bits=int(info.nmant),
        max=float(info.max),
        smallest_normal=float(info.smallest_normal),
        smallest_subnormal=float(info.smallest_subnormal),
        has_inf=math.isinf(past_the_end),
        has_nan=math.isnan(float(np.asarray(np.nan, np.float32).astype(dtype))),
    )


def _tf32(single: Format) -> Format:
    """Returns TF32: float32's exponent with FP16's mantissa, stored in 32 bits."""
    mantissa_bits = FP16.mantissa_bits
    return Format(
        name="TF32",
        dtype_name=single.dtype_name,
        bits=19,
        mantissa_bits=mantissa_bits,
        max=(2 - 2.0**-mantissa_bits) * 2.0**127,
        smallest_normal=single.smallest_normal,
        smallest_subnormal=single.smallest_normal * 2.0**-mantissa_bits,
        has_inf=single.has_inf,
        has_nan=single.has_nan,
    )


FP32 = _from_dtype("FP32", np.float32)
FP16 = _from_dtype("FP16", np.float16)
TF32 = _tf32(FP32)
BF16 = _from_dtype("BF16", ml_dtypes.bfloat16)
FP8_E4M3 = _from_dtype("FP8_E4M3", ml_dtypes.float8_e4m3fn)
FP8_E5M2 = _from_dtype("FP8_E5M2", ml_dtypes.float8_e5m2)
FP4_E2M1 = _from_dtype("FP4_E2M1", ml_dtypes.float4_e2m1fn)

FORMATS = (FP32, TF32, BF16, FP16, FP8_E4M3, FP8_E5M2, FP4_E2M1)
"""Every format, widest first."""

_ALIASES = {
    "float": FP32,
    "float32": FP32,
    "f32": FP32,
    "half": FP16,
    "float16": FP16,
    "f16": FP16,
    "bfloat16": BF16,
    "e4m3": FP8_E4M3,
    "e5m2": FP8_E5M2,
    "e2m1": FP4_E2M1,
    "float8_e4m3fn": FP8_E4M3,
    "float8_e5m2": FP8_E5M2,
    "float4_e2m1fn": FP4_E2M1,
    "float4_e2m1fn_x2": FP4_E2M1,
} | {known.name.lower(): known for known in FORMATS}


def get_format(spec: Any) -> Format:
    """Returns the format meant by a name, a numpy dtype, or any framework's dtype.

    >>> get_format("half").name, get_format(np.float16).name, get_format("torch.bfloat16").name
    ('FP16', 'FP16', 'BF16')

    Raises:
        ValueError: nothing is known by that name.
    """
    if isinstance(spec, Format):
        return spec
    name = spec if isinstance(spec, str) else _dtype_name(spec)
    found = _ALIASES.get(name.rsplit(".", 1)[-1].lower())
    if found is None:
        known = ", ".join(sorted(_ALIASES))
        kind = "of that name" if isinstance(spec, str) else "for that dtype"
        raise ValueError(
            f"There is no format {kind}. Received: {short(spec)}.{did_you_mean(name, _ALIASES)} Known names: {known}."
        )
    return found


def _dtype_name(dtype: Any) -> str:
    """Returns a dtype object's bare name: `name` (numpy, TensorFlow), `__name__` (jax.numpy), or its text (torch)."""
    for attribute in ("name", "__name__"):
        if isinstance(name := getattr(dtype, attribute, None), str):
            return name
    return str(dtype)
