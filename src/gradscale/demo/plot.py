"""The plot: the loss, the scale and the gradients lost to zero, over the steps of the runs."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradscale.demo.extra import check_extra
from gradscale.demo.run import Comparison

# Colours that the colour-blind can distinguish; wide lines below narrow ones, so that runs that agree are all seen.
STYLES = (
    {"color": "#b0b0b0", "linewidth": 6.0},
    {"color": "#d55e00", "linewidth": 2.0},
    {"color": "#0072b2", "linewidth": 3.0},
    {"color": "#009e73", "linewidth": 1.4},
    {"color": "#e69f00", "linewidth": 2.0, "linestyle": "--"},
    {"color": "#cc79a7", "linewidth": 2.0, "linestyle": "--"},
)

SMOOTHING = 0.9
"""Share of the average that stays at each step."""


def save_plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """Writes a plot with a row for each comparison to `path`, as PNG or SVG by its ending. Needs no display."""
    check_extra()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # The same run writes the same bytes: no date, no version, no random ids.
    metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with rc_context({"svg.hashsalt": "gradscale", "font.size": 9.5, "axes.titlesize": 10.5}):
        figure = Figure(figsize=(12, 3.7 * len(comparisons)), dpi=130, layout="constrained")
        for row, comparison in zip(figure.subplots(len(comparisons), 3, squeeze=False), comparisons, strict=True):
            for axes, draw in zip(row, (_draw_losses, _draw_scales, _draw_lost), strict=True):
                _decorate(axes, draw, comparison)
        figure.savefig(path, metadata=metadata)


def _decorate(axes: Any, draw: Callable[[Any, Comparison], None], comparison: Comparison) -> None:
    draw(axes, comparison)
    axes.set_xlabel("step")
    axes.margins(x=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_losses(axes: Any, comparison: Comparison) -> None:
    score, spec = next(iter(comparison.subject.scores.items()))
    for run, style in zip(comparison.runs, STYLES, strict=False):
        label = f"{run.recipe}: {score} {run.scores[score]:{spec}}"
        axes.plot(smoothed(run.losses), label=label, **style)
    axes.set_yscale("log")
    axes.set_title(comparison.subject.loss_title, loc="left", fontweight="bold")
    axes.legend(frameon=False, fontsize=9)


def _draw_scales(axes: Any, comparison: Comparison) -> None:
    for run, style in zip(comparison.runs, STYLES, strict=False):
        axes.plot(run.scales, **style)
        skips = [run.scales[step] for step in run.skipped]
        axes.plot(run.skipped, skips, "x", color=style["color"], markersize=7, markeredgewidth=2)
    highest = math.ceil(math.log2(max(max(run.scales) for run in comparison.runs)))
    axes.set_yscale("log", base=2)
    axes.set_yticks([2.0**exponent for exponent in range(0, highest + 1, 4)])
    axes.set_title("Scale (x: step skipped)", loc="left", fontweight="bold")


def _draw_lost(axes: Any, comparison: Comparison) -> None:
    for run, style in zip(comparison.runs, STYLES, strict=False):
        axes.plot(run.sampled, [100 * share for share in run.lost], **style)
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter("{x:.0f}%")
    axes.set_title("Gradients lost to zero", loc="left", fontweight="bold")


def smoothed(values: Sequence[float]) -> list[float]:
    """Returns a moving average that starts at the first value and skips what is not finite."""
    averages: list[float] = []
    average = values[0]
    for value in values:
        if np.isfinite(value):
            average = SMOOTHING * average + (1 - SMOOTHING) * value
        averages.append(average)
    return averages
