"""The plots: six bars that sum up the benchmarks, and the cost of a parameter as models grow."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import Row
from matplotlib.figure import Figure

# Colors that the color-blind can distinguish.
OURS, OTHER = "#0072b2", "#b0b0b0"

BARS = {
    ("LossScaler: step + clip, AdamW fused, 25M in 160", "torch GradScaler"): (
        "step with clipping: LossScaler against torch's GradScaler"
    ),
    ("LossScaler: step + clip, AdamW fused, 25M in 160", "no scaling"): (
        "step with clipping: LossScaler against clipping without scaling"
    ),
    ("LossScaler: step, AdamW fused, 25M in 160", "torch GradScaler"): (
        "step without clipping: LossScaler against torch's GradScaler"
    ),
    ("drop-in: step + clip, AdamW fused, 25M in 160", "torch GradScaler"): (
        "step with clipping: the drop-in against torch's GradScaler"
    ),
    ("JAX apply: step + clip, compute-bound, MLP of 4 x 512", "flax DynamicScale"): (
        "JAX, training step with clipping: LossScaler against flax"
    ),
    ("training step: GPT of 3.2M, float32", "no scaling"): (
        "training step of a small GPT: LossScaler against no scaling"
    ),
}
"""The rows that are drawn, by benchmark and baseline, and what stands above their bars."""


def draw_bars(rows: Sequence[Row], path: Path) -> None:
    """Writes a plot of the rows in `BARS`: their ratios and quartiles."""
    found = {(row.benchmark, row.baseline): row for row in rows}
    drawn = [(label, found[name]) for name, label in BARS.items() if name in found]
    figure = Figure(figsize=(4.6, 4.2), dpi=160, layout="constrained")  # readable on a phone as well
    axes: Any = figure.subplots()
    for place, (label, row) in enumerate(drawn):
        axes.barh(place, row.measured, height=0.4, color=OURS)
        axes.text(0, place - 0.27, label, fontsize=8.5)
        axes.text(0.03, place, f"{row.measured:.2f}", color="white", va="center", fontweight="bold")
        axes.plot(row.quartiles, (place, place), color="black", linewidth=1.5)
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8, zorder=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("time, as a share of the baseline's (black: quartiles)")
    _finish(figure, axes, path)


def draw_growth(rows: Sequence[Row], path: Path) -> None:
    """Writes a plot of the rows of what a parameter costs in models of several sizes."""
    sized = sorted((row.parameters, row) for row in rows if row.parameters is not None)
    figure = Figure(figsize=(7, 4), dpi=130, layout="constrained")
    axes: Any = figure.subplots()
    sizes = [size for size, _ in sized]
    axes.plot(sizes, [row.baseline_measured for _, row in sized], "o-", color=OTHER, label=sized[0][1].baseline)
    axes.plot(sizes, [row.measured for _, row in sized], "o-", color=OURS, label="LossScaler")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size / 1e6:g}M" for size in sizes], minor=False)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("parameters")
    axes.set_ylabel(sized[0][1].unit)
    axes.set_title("Cost of a step with clipping", loc="left", fontweight="bold")
    axes.legend(frameon=False)
    _finish(figure, axes, path)


def _finish(figure: Figure, axes: Any, path: Path) -> None:
    axes.grid(axis="both", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    # The same rows write the same bytes: no date, no version.
    metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(path, metadata=metadata)
