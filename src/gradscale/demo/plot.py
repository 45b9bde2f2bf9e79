"""The plot: the loss, the scale and the gradients lost to zero, over the steps of the runs."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradscale.demo.extra import check_extra
from gradscale.demo.run import Comparison, Run

# Colors that the color-blind can distinguish; wide lines below narrow ones, so that runs that agree are all seen.
STYLES: dict[str, dict[str, Any]] = {
    "FP32": {"color": "#b0b0b0", "linewidth": 6.0},
    "FP16 unscaled": {"color": "#d55e00", "linewidth": 2.0},
    "FP16 Headroom": {"color": "#0072b2", "linewidth": 3.0},
    "FP16 Dynamic": {"color": "#009e73", "linewidth": 1.4},
}
"""The runs that are drawn. Static scales and FP8 are in the table alone: more lines could not be told apart."""

SCALED = ("FP16 Headroom", "FP16 Dynamic")

CAPTION = (
    "Without a scale, FP16 rounds small gradients to zero (right); the left shows what that does to the loss.\n"
    "Headroom sets the scale by the largest gradient. Dynamic starts too high: its first steps overflow and are\n"
    "skipped (crosses), and the scale halves until the gradients fit. It doubles after 50 clean steps, and halves\n"
    "where that overflows."
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
    with rc_context({"svg.hashsalt": "gradscale", "font.size": 9.5, "axes.titlesize": 10}):
        # 9 inches wide: letters are then 12 pixels high where a page shows the plot at 830.
        figure = Figure(figsize=(9, 2.9 * len(comparisons) + 0.6), dpi=180, layout="constrained", facecolor="white")
        for row, comparison in zip(figure.subplots(len(comparisons), 3, squeeze=False), comparisons, strict=True):
            for axes, draw in zip(row, (_draw_losses, _draw_scales, _draw_lost), strict=True):
                _decorate(axes, draw, comparison)
        # One legend for all panels, above them, where it covers no line.
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=4, frameon=False)
        figure.supxlabel(CAPTION, x=0.01, ha="left", fontsize=9)
        figure.savefig(path, metadata=metadata)


def _decorate(axes: Any, draw: Callable[[Any, Comparison], None], comparison: Comparison) -> None:
    draw(axes, comparison)
    axes.set_xlabel("step")
    axes.margins(x=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _drawn(comparison: Comparison, names: Iterable[str] = STYLES) -> list[tuple[Run, dict[str, Any]]]:
    """Returns the runs of these names that there are, with their styles."""
    return [(run, STYLES[run.recipe]) for run in comparison.runs if run.recipe in names]


def _draw_losses(axes: Any, comparison: Comparison) -> None:
    for run, style in _drawn(comparison):
        axes.plot(smoothed(run.losses), label=run.recipe, **style)
    axes.set_yscale("log")
    axes.set_title(comparison.subject.loss_title, loc="left", fontweight="bold")


def _draw_scales(axes: Any, comparison: Comparison) -> None:
    for run, style in _drawn(comparison, SCALED):
        axes.plot(run.scales, **style)
        skips = [run.scales[step] for step in run.skipped]
        axes.plot(run.skipped, skips, "x", color=style["color"], markersize=6, markeredgewidth=1.5)
    scales = [scale for run, _ in _drawn(comparison, SCALED) for scale in run.scales]
    lowest, highest = math.floor(math.log2(min(scales))), math.ceil(math.log2(max(scales)))
    axes.set_yscale("log", base=2)
    axes.set_yticks([2.0**exponent for exponent in range(lowest - lowest % 4, highest + 1, 4)])
    axes.minorticks_off()
    axes.set_title("Scale (x: step skipped)", loc="left", fontweight="bold")


def _draw_lost(axes: Any, comparison: Comparison) -> None:
    for run, style in _drawn(comparison, ("FP16 unscaled", *SCALED)):
        axes.plot(run.sampled, [100 * share for share in run.lost], **style)
    axes.set_ylim(-2, 100)
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
