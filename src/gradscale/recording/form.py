"""The lines of a record: a header for each part of a run, and one object a step."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self, cast

import numpy as np

from gradscale._text import short
from gradscale.engine.culprits import Culprit
from gradscale.engine.measurement import UNKNOWN_RATIO
from gradscale.engine.result import Status
from gradscale.engine.saved import Saved, read_saved
from gradscale.formats import FP32
from gradscale.histogram.counts import EXPONENTS, LOWEST_EXPONENT, ExponentHistogram
from gradscale.record import plain
from gradscale.watching.rows import Kind

SCHEMA = 1
"""Version of the lines. Raised when a key is renamed, removed or changes its meaning; new keys may be added."""

_encoded = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode

NUMBERS = ("scale", "norm", "amax", "share")
"""What a step has in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line of a part of a run.

    A new part begins where a run is resumed, and where the state before a step is not the one after the last: after
    `load_state_dict`, another policy, a scale that was set, and a retry, which lowers the scale before the step.

    Attributes:
        gradscale: version of the library.
        policy: the rule, as `to_dict` wrote it; so is `state`, from before the first step of this part.
        amax_ratio: ratio of amax to norm before that step, where amax is estimated between two reads.
        format: the format whose range bounds the scaled gradients, such as `"FP16"`.
        started: when this part began, in seconds since 1970.
        rank: whose record it is, of `ranks` that share the scale.
        resumed: whether there are earlier parts.
    """

    gradscale: str
    policy: Mapping[str, Any]
    state: Mapping[str, Any]
    amax_ratio: float = UNKNOWN_RATIO
    format: str = "FP16"
    framework: str = ""
    framework_version: str = ""
    started: float = 0.0
    rank: int = 0
    ranks: int = 1
    resumed: bool = False

    def line(self) -> str:
        """Returns the header as a line, with its end."""
        values = {"gradscale": self.gradscale, "schema": SCHEMA, **asdict(self)}
        return _line({name: value for name, value in values.items() if value is not False})

    def saved(self) -> Saved:
        """Returns the policy and the state, checked.

        Raises:
            TypeError: a value has the wrong type.
            ValueError: the policy is of a class that is not loaded, or a value is out of range.
        """
        return read_saved({"policy": self.policy, "state": self.state, "amax_ratio": self.amax_ratio}, kind="record")


OUTSIDE = ("zeros", "infs", "nans")
"""What is counted outside of the bins."""


class Watched(NamedTuple):
    """What `watch` has counted of one tensor: its key, and the fields of its `Tally`.

    Attributes:
        name: of the module, or of the parameter for a weight and its gradient.
        kind: as in `WatchRow`; so are the type and the scale.
        histogram: the numbers; gradients are unscaled.
        amax: the largest magnitude; NaN where there is one.
        dtype: as said.
        scale: as said.
    """

    name: str
    kind: Kind
    histogram: ExponentHistogram
    amax: float
    dtype: Any
    scale: float

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values that go through JSON, with the counts from the lowest to the highest bin in use."""
        counts = np.trim_zeros(self.histogram.host_counts, "b")
        used = np.trim_zeros(counts, "f")
        return {
            "name": self.name,
            "kind": self.kind,
            "dtype": str(self.dtype).removeprefix("torch."),
            "amax": plain(self.amax),
            "scale": plain(self.scale),
            **{name: int(getattr(self.histogram, name)) for name in OUTSIDE},
            "first": len(counts) - len(used) + LOWEST_EXPONENT,
            "counts": used.tolist(),
        }

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Self:
        """Returns what `to_dict` wrote. The type is its name."""
        counts = np.zeros(EXPONENTS.size, np.int64)
        first = mapping["first"] - LOWEST_EXPONENT
        counts[first : first + len(mapping["counts"])] = mapping["counts"]
        histogram = ExponentHistogram(counts, *(np.int64(mapping[name]) for name in OUTSIDE))
        amax, scale = float(mapping["amax"]), float(mapping["scale"])
        return cls(mapping["name"], mapping["kind"], histogram, amax, mapping["dtype"], scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a run. What is not known is None or empty.

    Attributes:
        step: its number, counted from 0: how many were applied or skipped before it.
        scale: the scale that made the gradients.
        status: whether it was applied, or why it was skipped.
        norm: norm of all gradients, unscaled and before clipping; inf after an overflow.
        amax: largest magnitude of any gradient, unscaled, as the rule saw it, measured or estimated; inf likewise.
        share: share of gradient elements above the edge that the policy watches.
        retries: how often the backward pass was run again.
        culprits: the parameters whose gradients were not finite.
        note: numbers of the user, such as loss and learning rate.
        watch: what was counted of tensors at a sampled step.
        seconds: time since the header.
    """

    step: int
    scale: float
    status: Status
    norm: float | None = None
    amax: float | None = None
    share: float | None = None
    retries: int = 0
    culprits: Sequence[Culprit] = ()
    note: Mapping[str, float] = field(default_factory=dict[str, float])
    watch: Sequence[Watched] = ()
    seconds: float | None = None

    def line(self) -> str:
        """Returns the step as a line, with its end. Its numbers are rounded to float32."""
        values: dict[str, Any] = {"step": self.step, "scale": _single(self.scale), "status": self.status}
        numbers = ("norm", self.norm), ("amax", self.amax), ("share", self.share)
        values |= {name: _single(value) for name, value in numbers if value is not None}
        if self.retries:
            values["retries"] = self.retries
        if self.culprits:
            values["culprits"] = [[each.name, each.kind, each.count] for each in self.culprits]
        if self.note:
            values["note"] = {name: _exact(value) for name, value in self.note.items()}
        if self.watch:
            values["watch"] = [tally.to_dict() for tally in self.watch]
        if self.seconds is not None:
            values["seconds"] = round(self.seconds, 1)
        return _line(values)


def read_line(line: str | bytes) -> Header | Step:
    """Returns the header or the step that a line of a record holds. Keys that are not known are ignored.

    Raises:
        ValueError: the line is not JSON, not one of a record, or of an unknown schema.
    """
    values: Any = None
    try:
        values = json.loads(line)
        if values.get("schema", SCHEMA) == SCHEMA:
            if "gradscale" in values:
                return Header(**{name: values[name] for name in Header.__dataclass_fields__ if name in values})
            return _read_step(values)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(
            "A line of a record is JSON, as `LossScaler(record=...)` writes it: a header, with `gradscale` and "
            f"`schema`, or a step, with `step`, `scale` and `status`. Received: {short(line)} ({error!r})."
        ) from error
    raise ValueError(
        f"This version of gradscale reads records of schema {SCHEMA}. Received: schema={short(values['schema'])}, "
        f"written by gradscale {short(values.get('gradscale'))}. Read it with that version, or a newer one."
    )


def _read_step(values: Mapping[str, Any]) -> Step:
    with np.errstate(over="ignore"):
        numbers = {name: float(np.float32(values[name])) for name in NUMBERS if name in values}
    return Step(
        step=int(values["step"]),
        status=Status(values["status"]),
        **cast(Any, numbers),
        retries=int(values.get("retries", 0)),
        culprits=tuple(Culprit(*each) for each in values.get("culprits", ())),
        note={name: float(value) for name, value in values.get("note", {}).items()},
        watch=tuple(map(Watched.from_dict, values.get("watch", ()))),
        seconds=values.get("seconds"),
    )


def _single(value: float) -> float | str:
    """Returns a number as JSON holds it: with the 9 digits that give the same float32, or as a string."""
    number = float(f"{value:.9g}")
    return number if math.isfinite(number) else str(number)


def _exact(value: float) -> float | str:
    """Returns the same for a number that need not be one of float32, and keeps all digits then."""
    return value if abs(value) < FP32.max and float(np.float32(value)) != value else _single(value)


def _line(values: Mapping[str, Any]) -> str:
    return _encoded(values) + "\n"
