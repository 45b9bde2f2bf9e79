"""Loggers as targets of a record: TensorBoard, W&B, MLflow, and any function of a dict and a step."""

import math
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any, NamedTuple

from gradscale._text import short, shown
from gradscale.histogram.counts import EXPONENTS, ExponentHistogram
from gradscale.recording.form import Step
from gradscale.watching.rows import KINDS

PREFIX = "gradscale/"
"""Loggers group metrics by the part of their name before a slash."""

GRAD_NORM = f"{PREFIX}grad_norm"

Row = Mapping[str, float]


def logged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the `metrics()` of a scaler as a logger takes them; those that are not known are left out.

    >>> logged({"scale": 1024.0, "grad_norm": float("nan")})
    {'gradscale/scale': 1024.0}
    """
    return {PREFIX + name: value for name, value in metrics.items() if not math.isnan(value)}


class Logger(NamedTuple):
    """What writes rows.

    Attributes:
        write: is called with the row of a step, and the step.
        name: what it is.
        every: whether it gets every step; else one a second, and those that are skipped or sampled.
    """

    write: Callable[[Row, Step], object]
    name: str
    every: bool = False


def logger_of(target: Any) -> Logger:
    """Returns the logger that writes to `target`.

    That is a `SummaryWriter`; the run that `wandb.init` returns; the module `mlflow`, or a logger of Lightning; or a
    function of a dict and a step.

    Raises:
        TypeError: it is none of these.
    """
    if hasattr(target, "add_histogram_raw"):
        return Logger(partial(_to_tensorboard, target), "TensorBoard")
    if hasattr(target, "define_metric"):
        # With a step of its own, and in the next row that the user logs: W&B drops rows of a step that has passed.
        target.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")
        return Logger(lambda row, step: target.log({**row, f"{PREFIX}step": step.step}, commit=False), "W&B")
    if hasattr(target, "log_metrics"):
        return Logger(lambda row, step: target.log_metrics(dict(row), step=step.step), "MLflow")
    if callable(target):
        return Logger(lambda row, step: target(dict(row), step.step), short(target), every=True)
    raise TypeError(
        "`record` takes the path of a file, a `SummaryWriter`, a run of W&B, the module `mlflow`, a function of a dict "
        f"and a step, or a list of them. Received: {shown(target)}."
    )


def _to_tensorboard(writer: Any, row: Row, step: Step) -> None:
    for name, value in row.items():
        writer.add_scalar(name, value, step.step)
    for kind in KINDS:
        histograms = [tally.histogram for tally in step.watch if tally.kind == kind]
        if not histograms or not (total := reduce(ExponentHistogram.__add__, histograms)).nonzero:
            continue
        # Of logarithms: among the magnitudes themselves all buckets but the last few would look empty.
        used = slice(total.lowest - EXPONENTS[0], total.highest - EXPONENTS[0] + 1)
        counts, middles = total.host_counts[used], EXPONENTS[used] + 0.5
        moments = int(counts.sum()), float(counts @ middles), float(counts @ middles**2)
        buckets = (middles + 0.5).tolist(), counts.tolist()
        name, ends = f"{PREFIX}log2_{kind}", (total.lowest, total.highest + 1)
        writer.add_histogram_raw(name, *ends, *moments, *buckets, global_step=step.step)
