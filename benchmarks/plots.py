"""The plots: every timed row against its goal, and the cost of a parameter as models grow."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rows import TIMES, Row

# Colors that the color-blind can distinguish.
MET, MISSED, PLAIN, OTHER = "#0072b2", "#d55e00", "#606060", "#b0b0b0"
COLORS = {True: MET, False: MISSED, None: PLAIN}


def draw_goals(rows: Sequence[Row], path: Path) -> None:
    """Writes a plot of the rows that were timed: the ratio, its quartiles, and the goal."""
    timed = [row for row in rows if row.unit == TIMES]
    figure = Figure(figsize=(11, 1.2 + 0.3 * len(timed)), dpi=130, layout="constrained")
    axes: Any = figure.subplots()
    for place, row in enumerate(timed):
        _draw_row(axes, place, row)
    axes.set_yticks(range(len(timed)), [f"{row.benchmark}\nagainst {row.baseline}" for row in timed], fontsize=6.5)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlim(left=0)
    axes.set_xlabel("times as long as the baseline (bar: quartiles; |: goal)")
    axes.set_title("Measured (blue: goal met; orange: missed; gray: no goal)", loc="left", fontweight="bold")
    _finish(figure, axes, path)


def draw_growth(rows: Sequence[Row], path: Path) -> None:
    """Writes a plot of the rows of what a parameter costs in models of several sizes."""
    sized = sorted((row.parameters, row) for row in rows if row.parameters is not None)
    figure = Figure(figsize=(7, 4), dpi=130, layout="constrained")
    axes: Any = figure.subplots()
    sizes = [size for size, _ in sized]
    axes.plot(sizes, [row.baseline_measured for _, row in sized], "o-", color=OTHER, label=sized[0][1].baseline)
    axes.plot(sizes, [row.measured for _, row in sized], "o-", color=MET, label="LossScaler")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size / 1e6:g}M" for size in sizes], minor=False)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("parameters")
    axes.set_ylabel(sized[0][1].unit)
    axes.set_title("Cost of a step with clipping", loc="left", fontweight="bold")
    axes.legend(frameon=False)
    _finish(figure, axes, path)


def _draw_row(axes: Any, place: int, row: Row) -> None:
    color = COLORS[row.met]
    if row.quartiles is not None:
        axes.plot(row.quartiles, (place, place), color=color, linewidth=3, alpha=0.35, solid_capstyle="butt")
    axes.plot(row.measured, place, "o", color=color, markersize=5)
    if row.goal is not None:
        axes.plot(row.goal, place, "|", color="black", markersize=11, markeredgewidth=1.5)


def _finish(figure: Figure, axes: Any, path: Path) -> None:
    axes.grid(axis="both", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    # The same rows write the same bytes: no date, no version.
    metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(path, metadata=metadata)
