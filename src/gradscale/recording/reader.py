"""A run, read back from its record: columns of numbers, and what was noted beside them."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gradscale.engine.culprits import Culprit
from gradscale.engine.result import Status
from gradscale.recording.form import Header, Step, Watched, read_line

Vector = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Run:
    """The steps of a run in order, as columns of one length. A number that is not known is NaN.

    Attributes:
        name: of the file.
        step: number of each step.
        scale: the scale that made the gradients.
        status: values of `Status`.
        norm: norm of all gradients, unscaled.
        amax: largest magnitude of any gradient, unscaled, as the rule saw it.
        share: share of gradient elements above the edge that the policy watches.
        retries: how often the backward pass was run again.
        notes: the numbers of the user, by name.
        culprits: by the row of the step, the parameters whose gradients were not finite.
        watch: by the row of the step, what was counted of tensors.
        parts: the header of each part, with the row where it begins; none for a log of another system.
        lines: by the row of the step, the line of a log that it was read from.
        format: name of the format whose range bounds the scaled gradients.
    """

    name: str
    step: Vector
    scale: Vector
    status: Vector
    norm: Vector
    amax: Vector
    share: Vector
    retries: Vector
    notes: Mapping[str, Vector]
    culprits: Mapping[int, Sequence[Culprit]] = field(default_factory=dict[int, Sequence[Culprit]])
    watch: Mapping[int, Sequence[Watched]] = field(default_factory=dict[int, Sequence[Watched]])
    parts: Sequence[tuple[int, Header]] = ()
    lines: Mapping[int, str] = field(default_factory=dict[int, str])
    format: str = "FP16"

    def __len__(self) -> int:
        return len(self.step)

    def __repr__(self) -> str:
        return f"Run({self.name!r}, steps={len(self)}, skipped={int(self.skipped.sum())})"

    @property
    def applied(self) -> Vector:
        """Whether each step was applied."""
        return self.status == Status.APPLIED.value

    @property
    def skipped(self) -> Vector:
        """Whether each step was skipped. One without gradients is neither skipped nor applied."""
        return (self.status == Status.OVERFLOW.value) | (self.status == Status.NONFINITE_LOSS.value)

    @property
    def loss(self) -> Vector:
        """The user's note whose name has the word loss in it, `loss` itself first; NaN without one."""
        names = sorted((name for name in self.notes if "loss" in name.lower()), key=lambda name: (name != "loss", name))
        return self.notes[names[0]] if names else np.full(len(self), np.nan)

    def plot(self) -> Any:
        """Returns a plotly figure of scale, skips, loss and norm over the steps."""
        from gradscale.report.figures import timeline
        from gradscale.report.page import figure

        return figure(timeline([self]))

    def _repr_html_(self) -> str:
        from gradscale.report.page import summary

        return summary(self)


def read_run(path: str | Path) -> Run:
    """Returns the run that a record holds.

    A torn last line, as a killed process leaves it, is dropped. Where a step number occurs again, because the run was
    resumed from an older checkpoint, what was recorded from that number on before is dropped.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a record, or of an unknown schema.
    """
    steps: list[Step] = []
    parts: list[tuple[int, Header]] = []
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            read = read_line(line)
        except ValueError as error:
            if number == len(lines) and parts:  # without an end
                break
            raise ValueError(f"{path}, line {number}: {error}") from error
        if isinstance(read, Header):
            parts.append((len(steps), read))
            continue
        if not parts:
            raise ValueError(f"A record begins with a header. Received: {path}, which begins with a step.")
        if steps and read.step <= steps[-1].step:
            again = bisect_left(steps, read.step, key=lambda step: step.step)
            # The last header is that of this step.
            parts = [(min(row, again), each) for row, each in parts if row < again or each is parts[-1][1]]
            del steps[again:]
        steps.append(read)
    if not parts:
        raise ValueError(f"A record begins with a header. Received: {path}, which has none.")
    return run_of(steps, str(path), parts=parts, format=parts[0][1].format)


def run_of(steps: Sequence[Step], name: str, **more: Any) -> Run:
    """Returns a run of steps whose numbers rise."""
    names = dict.fromkeys(name for step in steps for name in step.note)
    return Run(
        name=name,
        step=np.array([step.step for step in steps], np.int64),
        status=np.array([step.status.value for step in steps], "U14"),
        retries=np.array([step.retries for step in steps], np.int64),
        **{key: _column(steps, lambda step, key=key: getattr(step, key)) for key in ("scale", "norm", "amax", "share")},
        notes={key: _column(steps, lambda step, key=key: step.note.get(key)) for key in names},
        culprits={row: step.culprits for row, step in enumerate(steps) if step.culprits},
        watch={row: step.watch for row, step in enumerate(steps) if step.watch},
        **more,
    )


def _column(steps: Iterable[Step], read: Callable[[Step], float | None]) -> Vector:
    return np.array([np.nan if (value := read(step)) is None else value for step in steps], np.float64)
