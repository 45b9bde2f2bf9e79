"""What is shown of a comparison: the table, the verdict and the plot."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from examples.demo.runs import Comparison, Run
from rich import box
from rich.table import Table

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

UNLEARNED = 0.1
"""Share of FP32's progress below which a run has not learned."""


def make_table(comparison: Comparison) -> Table:
    """Returns a table with a row for each run."""
    subject = comparison.subject
    first, *others = subject.scores
    caption = f"{subject.caption}; lost: share of gradients that became zero"
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    table.add_column(subject.model, no_wrap=True)
    for heading in (first, "loss", *others, "lost", "skipped", "scale"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in comparison.runs:
        score, *further = (f"{run.scores[name]:{spec}}" for name, spec in subject.scores.items())
        loss = f"{run.final_loss():.3f}"
        lost = "-" if math.isnan(run.share_lost()) else f"{run.share_lost():.1%}"
        scale = f"2^{math.log2(run.scales[-1]):.0f}"
        table.add_row(run.recipe, score, loss, *further, lost, f"{len(run.skipped)}", scale)
    return table


def verdict(comparison: Comparison) -> str:
    """Returns which runs failed, which match FP32 within seed noise, and which overflowed and went on.

    Seed noise is the range of FP32's first score over its seeds. A run matches FP32 if it differs from FP32 with the
    same seed by no more than that.
    """
    reference, *others = comparison.runs
    score, spec = next(iter(comparison.subject.scores.items()))
    start, end = comparison.untrained[score], reference.scores[score]
    seeds = [end, *(scores[score] for scores in comparison.other_seeds.values())]
    noise = max(seeds) - min(seeds)
    shown = f"FP32's {score} is {min(seeds):{spec}} to {max(seeds):{spec}} over {len(seeds)} seeds"
    if not abs(end - start) > noise:
        return f"Too few steps to tell: {shown}, and {start:{spec}} before training."
    sentences = [_failure(run, score, (run.scores[score] - start) / (end - start)) for run in others if _unscaled(run)]
    scaled = [run for run in others if not _unscaled(run)]
    alike = [run for run in scaled if abs(run.scores[score] - end) <= noise]
    if alike:
        verb = "matches" if len(alike) == 1 else "match"
        furthest = max(abs(run.scores[score] - end) for run in alike)
        sentences.append(
            f"{_listed(alike)} {verb} FP32 within seed noise "
            f"(off by at most {_difference(furthest, spec)}, where {shown})."
        )
    else:
        sentences.append(f"{shown}.")
    sentences += [
        f"{run.recipe} ends at {run.scores[score]:{spec}}, further from FP32 than its seeds are from each other."
        for run in scaled
        if run not in alike
    ]
    sentences += [_overflows(run) for run in others if run.skipped]
    return " ".join(sentences)


def _unscaled(run: Run) -> bool:
    return run.recipe.endswith("unscaled")


def _failure(run: Run, score: str, progress: float) -> str:
    learned = "did not learn" if progress < UNLEARNED else f"made {progress:.0%} of FP32's progress in {score}"
    return f"{run.recipe} lost {run.share_lost():.0%} of its gradients and {learned}."


def _overflows(run: Run) -> str:
    """Returns how often a run overflowed, and the highest and lowest scale at which it did."""
    scales = [run.scales[step] for step in run.skipped]
    highest, lowest = _power(max(scales)), _power(min(scales))
    if len(scales) == 1:
        return f"{run.recipe} skipped a step that overflowed, at a scale of {highest}, and went on at a lower one."
    return (
        f"{run.recipe} skipped {len(scales)} steps that overflowed, at scales from {highest} down to {lowest}, "
        "and went on at lower ones."
    )


def _difference(value: float, spec: str) -> str:
    """Returns the difference of two scores. That of two percentages is in points, as 4% may also be 4% of a score."""
    return f"{100 * value:{spec[:-1]}f} points" if spec.endswith("%") else f"{value:{spec}}"


def _listed(runs: Sequence[Run]) -> str:
    names = [run.recipe for run in runs]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _power(scale: float) -> str:
    return f"2^{math.log2(scale):.0f}"


def save_plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """Writes a plot with a row for each comparison to `path`, as PNG or SVG by its ending. Needs no display."""
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
