"""Scales recorded from other systems' own code, and how closely a preset must match them.

A preset matches bit-exact wherever the rule is made of products, quotients, sums and comparisons, which are rounded the
same way everywhere. OpenSeq2Seq's `LogMaxScaler` also takes a logarithm, a power and a square root. Their last bits
differ between libraries and CPUs: torch's float32 root is MKL's, which on some CPUs rounds one number in six wrongly.
So it matches within the error that follows from theirs, and bit-exact where `correctly_rounded` rounds them.
"""

import json
import math
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradscale.peers import _log_max

DATA = Path(__file__).parents[1] / "data"
ULP = 2.0**-23
"""Spacing of float32 numbers, relative to the number, at most."""

FUNCTION_ERROR = 1.0
"""Error of a function in ULP: `logf` and `powf` have 0.82 in glibc and musl, 1.0 in SLEEF and MKL, which torch calls;
the root has 0.5 in C and numpy, and 0.75 in MKL."""

LOG2_TOP = 16.0


def rows(name: str) -> list[dict[str, Any]]:
    """Returns the recorded runs of one file."""
    return json.loads((DATA / name).read_text())


def correctly_rounded(monkeypatch: pytest.MonkeyPatch, xp: Any) -> None:
    """Gives `LogMaxScaler` a logarithm, a power and a root that are rounded correctly: the same on every machine.

    For all numbers in the recorded rows they have the bits that TensorFlow had. A root in float64, rounded to float32,
    is rounded correctly; the other two are worked out to 40 digits.
    """

    def log2(x: Any, xp: Any) -> Any:
        return _single(_ln(float(x)), xp) * _log_max.LOG2_E

    def exp2(x: Any, xp: Any) -> Any:
        return _single(_two_to(float(x)), xp)

    def sqrt(x: Any) -> Any:
        return _single(math.sqrt(x), xp)

    monkeypatch.setattr(_log_max, "log2", log2)
    monkeypatch.setattr(_log_max, "exp2", exp2)
    monkeypatch.setattr(xp, "sqrt", sqrt)


def _single(value: float, xp: Any) -> Any:
    return np.float32(value) if not hasattr(xp, "asarray") else xp.asarray(value, dtype=xp.float32)


def _ln(x: float) -> float:
    if x == 0 or not math.isfinite(x):
        return -math.inf if x == 0 else x
    with localcontext(prec=40):
        return float(Decimal(x).ln())


def _two_to(x: float) -> float:
    if not math.isfinite(x):
        return 0.0 if x == -math.inf else x
    with localcontext(prec=40):
        return float((Decimal(x) * Decimal(2).ln()).exp())


def assert_scales(row: dict[str, Any], found: list[float]) -> None:
    """Asserts that `found`, the scales after each step, are bit-exact those of the row.

    A row in which the peer raises has no scale from there on. One in which the peer's scale becomes NaN is compared up
    to there: a preset differs.
    """
    for step, (scale, recorded) in enumerate(zip(found, row["expected_scale"], strict=False)):
        wanted = scale if recorded is None else float(recorded)
        if math.isnan(wanted):
            break
        assert scale == wanted, f"step {step}"


def assert_scales_within_error(row: dict[str, Any], policy: Any, found: list[float]) -> None:
    """Asserts that the scales of a `LogMaxScaler` are those of the row, within the error of logarithm and power."""
    bounds = log_max_bounds(row, policy)
    steps = zip(found, row["expected_scale"], bounds, strict=False)
    for step, (scale, recorded, (low, high)) in enumerate(steps):
        assert low <= scale <= high, f"step {step}"
        assert low <= float(recorded) <= high, f"step {step}: the bounds are wrong"


def log_max_bounds(row: dict[str, Any], policy: Any) -> list[tuple[float, float]]:
    """Returns the lowest and the highest scale after each step that rounding allows a `LogMaxScaler`.

    The model is worked out in float64, with the constants and corrections of float32, which are products alone and so
    the same everywhere. In float32, `n` steps of `x` up to `largest` are off by as much as follows, in ULP. Each
    product, sum and quotient adds 1/2.

    - x, a logarithm times a constant: FUNCTION_ERROR + 1/2.
    - A running mean of x: that, 1 for its newest term, 1 for each step (times beta, plus the term), 1/2 to correct it.
    - A running mean of x * x: twice the error of x, and 1/2 more for the product.
    - The variance, a difference: the error of the mean of squares, twice that of the mean, and 1.
    - The deviation: |sqrt(a) - sqrt(b)| is at most sqrt(|a - b|), and at most |a - b| / sqrt(a).
    - The exponent: the mean, the deviation (FUNCTION_ERROR for its root, 1/2 for its product) and two differences.
    - The scale, a power: FUNCTION_ERROR, and ln(2) times the error of the exponent.
    """
    bounds: list[tuple[float, float]] = []
    mean, slow_mean, square = _Mean(policy.beta1), _Mean(policy.beta2), _Mean(policy.beta2)
    largest = 0.0
    for n, (overflow, amax) in enumerate(zip(row["found_inf"], map(float, row["amax"]), strict=True), 1):
        if not overflow and amax == 0:
            break  # from here on the peer's scale is NaN
        x = 2.0**policy.log_max if overflow else math.log2(amax)
        largest = max(largest, abs(x))
        variance = max(square.with_next(x * x) - slow_mean.with_next(x) ** 2, 0.0)
        deviation = math.sqrt(variance)
        of_x = FUNCTION_ERROR + 0.5
        of_mean = of_x + 1 + n + 0.5
        of_variance = (2 * of_x + 0.5 + 1 + n + 0.5) + 2 * of_mean + 1
        off = of_variance * ULP * largest**2
        of_deviation = min(math.sqrt(off), off / deviation if deviation else math.inf)
        of_deviation += (FUNCTION_ERROR + 0.5) * ULP * deviation
        exponent = LOG2_TOP - mean.with_next(x) - policy.overflow_std_dev * deviation
        error = of_mean * ULP * largest + policy.overflow_std_dev * of_deviation + (LOG2_TOP + abs(exponent)) * ULP
        error += FUNCTION_ERROR * ULP / math.log(2)
        ends = (max(min(exponent + sign * error, 1000.0), -1000.0) for sign in (-1, 1))
        low, high = (min(max(2.0**end, policy.scale_min), policy.scale_max) for end in ends)
        bounds.append((low, high))
    return bounds


class _Mean:
    """A running mean in float64, with the decay and the correction that a float32 program has."""

    def __init__(self, decay: float) -> None:
        self.decay, self.rest = float(np.float32(decay)), float(np.float32(1 - decay))
        self.total, self.correction = 0.0, np.float32(1)

    def with_next(self, x: float) -> float:
        self.total = self.total * self.decay + x * self.rest
        self.correction *= np.float32(self.decay)
        return self.total / float(np.float32(1) - self.correction)
