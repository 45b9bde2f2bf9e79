"""The steps of a replay: read from the caller's sequences and checked once."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gradscale._text import short
from gradscale.formats import Format
from gradscale.policies.contract import Policy, Seen
from gradscale.record import Array

Vector = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Track:
    """A sequence of steps.

    Attributes:
        steps: how many there are.
        known: the sequences by the name of the `Seen` field they fill, in the type the rules expect.
        peaks: largest gradients in float64, where they and the scale decide which step overflows; None where flags do.
        overflow_threshold: where the scaled gradients stop being finite.
    """

    steps: int
    known: dict[str, Vector]
    peaks: Vector | None
    overflow_threshold: float

    def seen(self, step: int, scale: Array, needs: frozenset[str]) -> Seen:
        """Returns what policies that need `needs`, and whose scales are `scale`, see in `step`."""
        facts = {name: values[step] for name, values in self.known.items() if name in needs}
        if self.peaks is not None and "finite" in needs:
            # In float64: a float32 product could round up to the threshold, or overflow.
            with np.errstate(over="ignore", invalid="ignore"):
                facts["finite"] = self.peaks[step] * scale.astype(np.float64) < self.overflow_threshold
        if "amax" in needs:
            # In training the largest gradient is not known after an overflow, so a policy must not see it here either.
            facts["amax"] = np.where(facts["finite"], facts["amax"], np.float32(np.inf))
        return Seen(**facts)

    def check_known(self, policy: Policy) -> None:
        """Raises if `policy` reads something that is not known."""
        if missing := sorted(policy.needs - {"finite", "loss_finite"} - self.known.keys()):
            names = " and ".join(f"`{name}`" for name in missing)
            raise ValueError(
                f"{type(policy).__name__} reads {names}. Received only: {', '.join(map(_argument, self.known))}. "
                f"Pass {names} to `replay` as well."
            )


def read_track(found_inf: Any, amax: Any, loss_finite: Any, upper_share: Any, format: Format) -> Track:
    """Returns the steps that the caller's sequences describe.

    Raises:
        TypeError: a sequence does not hold numbers.
        ValueError: neither `found_inf` nor `amax` is given, the lengths differ, or a value is out of range.
    """
    if found_inf is None and amax is None:
        raise ValueError(
            "`replay` needs `found_inf`, whether each step overflowed, or `amax`, each step's largest unscaled "
            "gradient. Received neither."
        )
    known: dict[str, Vector] = {}
    if found_inf is not None:
        known["finite"] = ~_flags("found_inf", found_inf)
    if loss_finite is not None:
        known["loss_finite"] = _flags("loss_finite", loss_finite)
    peaks = None if amax is None else _magnitudes("amax", amax)
    if peaks is not None:
        known["amax"] = peaks.astype(np.float32)
    if upper_share is not None:
        known["upper_share"] = _magnitudes("upper_share", upper_share).astype(np.float32)
    steps = _common_length({name: len(values) for name, values in known.items()})
    return Track(steps, known, peaks if found_inf is None else None, format.overflow_threshold)


def _vector(name: str, values: Any) -> Vector:
    try:
        vector = np.asarray(values)
    except (ValueError, TypeError):
        raise TypeError(f"`{name}` must be a flat sequence of numbers. Received: {short(values)}.") from None
    if vector.ndim != 1:
        raise ValueError(f"`{name}` must have one value for each step. Received an array of shape {vector.shape}.")
    if vector.size and vector.dtype.kind not in "biuf":
        raise TypeError(f"`{name}` must be a flat sequence of numbers. Received: {short(values)}.")
    return vector


def _flags(name: str, values: Any) -> Vector:
    flags = _vector(name, values)
    wrong = ~((flags == 0) | (flags == 1))
    if wrong.any():
        step = int(wrong.argmax())
        raise ValueError(f"`{name}` must hold flags: 0 or 1, False or True. Received: {flags[step]} at step {step}.")
    return flags.astype(bool)


def _magnitudes(name: str, values: Any) -> Vector:
    magnitudes = _vector(name, values).astype(np.float64)
    if (magnitudes < 0).any():
        step = int((magnitudes < 0).argmax())
        raise ValueError(f"`{name}` must not be negative. Received: {magnitudes[step]} at step {step}.")
    return np.where(magnitudes > np.finfo(np.float32).max, np.inf, magnitudes)


def _common_length(lengths: dict[str, int]) -> int:
    """Returns the common length of all sequences; raises if they differ, or if it is zero."""
    received = ", ".join(f"{_argument(name)} has {length}" for name, length in lengths.items())
    if len(set(lengths.values())) != 1:
        raise ValueError(f"Every sequence must have one value for each step. Received: {received}.")
    steps = next(iter(lengths.values()))
    if steps == 0:
        raise ValueError(f"There must be at least one step. Received: {received}.")
    return steps


def _argument(name: str) -> str:
    """Returns what `replay` calls the sequence that fills the field `name` of `Seen`."""
    return "`found_inf`" if name == "finite" else f"`{name}`"
