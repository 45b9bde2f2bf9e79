"""Draws the pictures of the pages under Learn from what `record.py` has recorded.

Command:  python docs/data/draw.py [--out FOLDER]
Needs:    pip install ".[demo]"
Writes:   docs/images/<name>.svg for light pages and <name>-dark.svg for dark ones, both without a background.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from recorded import load, recorded_histograms

from gradscale import BF16, FP8_E4M3, FP8_E5M2, FP16, Format
from gradscale.histogram import EXPONENTS, ExponentHistogram, best_static_scale, lost_share, overflow_share

IMAGES = Path(__file__).parents[1] / "images"

SHOWN = "CNN of 13 layers: all layers, first step"

# Of the colors that the color-blind can distinguish (Okabe and Ito), those that are legible on white and on black.
LOST, KEPT, OVERFLOW = "#d55e00", "#2f9e77", "#b65c9b"

THEMES = {"": {"ink": "#24292f", "band": "#0072b2"}, "-dark": {"ink": "#e6e6e6", "band": "#56b4e9"}}

ENDS = (-46, 44)
"""The exponents at the ends of the picture with three scales."""

TIMES = "loss \N{MULTIPLICATION SIGN}"

Theme = dict[str, str]


def draw_loss_scaling(theme: Theme) -> Figure:
    """Draws one histogram at three scales against FP16's range: underflow, fit, overflow."""
    histogram = recorded_histograms()[SHOWN]
    best = best_static_scale(histogram, FP16)
    panels = ((1.0, "Without scaling"), (best, "Scaled"), (2.0**32, "Scaled too far"))
    figure = Figure(figsize=(6.4, 5.4), layout="constrained")
    for axes, (scale, title) in zip(figure.subplots(3, 1, sharex=True), panels, strict=True):
        _draw_bars(axes, histogram, FP16, scale)
        _draw_range(axes, FP16, theme)
        axes.set_title(f"{title}: {TIMES} {_power(scale)}", loc="left", fontweight="bold", color=theme["ink"])
        axes.set_xlim(*ENDS)
        _label_shares(axes, histogram, scale)
    axes.set_xlabel("magnitude of the gradients as FP16 gets them")
    _exponent_ticks(axes, range(-40, 41, 10))
    return figure


def draw_formats(theme: Theme) -> Figure:
    """Draws the unscaled histogram above the ranges of four formats."""
    histogram = recorded_histograms()[SHOWN]
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    exponents, shares = _filled(histogram)
    upper.bar(exponents, shares, width=0.9, align="edge", color=KEPT)
    upper.set_title("Gradients of the CNN at its first step, unscaled", loc="left", fontweight="bold")
    upper.set_yticks([])
    formats = (FP16, BF16, FP8_E5M2, FP8_E4M3)
    for row, each in enumerate(formats):
        subnormal, normal, end = _exponents(each)
        lower.barh(row, end - normal, left=normal, height=0.55, color=theme["band"])
        lower.barh(row, normal - subnormal, left=subnormal, height=0.55, color=theme["band"], alpha=0.4)
    lower.set_yticks(range(len(formats)), [each.name.replace("_", " ") for each in formats])
    lower.invert_yaxis()
    lower.set_title("What each format holds (pale: subnormal, with fewer digits)", loc="left", fontweight="bold")
    lower.set_xlim(-52, 24)
    lower.spines["left"].set_visible(False)
    lower.tick_params(axis="y", length=0, pad=10)
    lower.set_xlabel("magnitude")
    # BF16's range goes on past both ends of the picture.
    for x, towards in ((-52, "<"), (24, ">")):
        lower.plot(x, 1, towards, color=theme["band"], markersize=11, clip_on=False)
    _exponent_ticks(lower, range(-50, 25, 10))
    return figure


def draw_dynamic(theme: Theme) -> Figure:
    """Draws the scale over the steps of the recorded FP16 run, and the steps that were skipped."""
    run = load("dynamic_run")
    exponents = np.log2(run["scales"])
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axes = figure.subplots()
    axes.step(range(len(exponents)), exponents, where="post", color=theme["band"], linewidth=1.8)
    skipped = run["skipped"]
    axes.plot(skipped, exponents[skipped], "x", color=LOST, markersize=8, markeredgewidth=2.2, label="step skipped")
    ticks = range(int(exponents.min()), int(exponents.max()) + 1)
    axes.set_yticks(ticks, [_power(2.0**tick) for tick in ticks])
    axes.set_title("Dynamic scale of the CNN in FP16", loc="left", fontweight="bold")
    axes.set_xlabel("step")
    axes.margins(x=0.01)
    axes.legend(frameon=False, loc="upper right", labelcolor=theme["ink"])
    return figure


def _draw_bars(axes: Any, histogram: ExponentHistogram, format: Format, scale: float) -> None:
    exponents, shares = _filled(histogram)
    exponents = exponents + int(math.log2(scale))
    subnormal, _, end = _exponents(format)
    colors = np.where(exponents < subnormal - 1, LOST, np.where(exponents >= end, OVERFLOW, KEPT))
    axes.bar(exponents, shares, width=0.9, align="edge", color=colors)
    axes.set_yticks([])
    axes.set_ylim(0, 8.6)


def _filled(histogram: ExponentHistogram) -> tuple[Any, Any]:
    """Returns the exponents of the bins that are not empty, and their shares in percent."""
    filled = histogram.counts > 0
    return EXPONENTS[filled], histogram.counts[filled] / histogram.nonzero * 100


def _draw_range(axes: Any, format: Format, theme: Theme) -> None:
    subnormal, normal, end = _exponents(format)
    axes.axvspan(subnormal - 1, normal, color=theme["band"], alpha=0.09, linewidth=0)
    axes.axvspan(normal, end, color=theme["band"], alpha=0.2, linewidth=0)
    for left, right, text in (
        (ENDS[0], subnormal - 1, "becomes 0"),
        (subnormal - 1, normal, "subnormal"),
        (normal, end, "normal"),
        (end, ENDS[1], "becomes inf"),
    ):
        axes.text((left + right) / 2, 7.4, text, ha="center", fontsize=10, color=theme["ink"])


def _label_shares(axes: Any, histogram: ExponentHistogram, scale: float) -> None:
    lost, over = lost_share(histogram, FP16, scale), overflow_share(histogram, FP16, scale)
    if lost > 0.001:
        axes.text(ENDS[0] + 1, 4.6, f"{lost:.0%} lost", color=LOST, fontweight="bold")
    if over > 0.001:
        axes.text(23, 2.6, f"{over:.0%} overflow:\nstep skipped", color=OVERFLOW, fontweight="bold")


def _exponents(format: Format) -> tuple[int, int, int]:
    """Returns the exponents of the smallest subnormal, the smallest normal, and the end of the format."""
    exponents = (math.frexp(x)[1] for x in (format.smallest_subnormal / 2, format.smallest_normal / 2, format.max))
    return tuple(exponents)  # type: ignore[return-value]


def _exponent_ticks(axes: Any, exponents: range) -> None:
    axes.set_xticks(exponents, [_power(2.0**exponent) for exponent in exponents])


def _power(value: float) -> str:
    return f"$2^{{{int(math.log2(value))}}}$"


PICTURES: dict[str, Callable[[Theme], Figure]] = {
    "loss_scaling": draw_loss_scaling,
    "formats": draw_formats,
    "dynamic_scale": draw_dynamic,
}


def save(folder: Path) -> list[Path]:
    """Writes every picture, light and dark, into `folder`, and returns their paths."""
    paths = []
    for name, draw in PICTURES.items():
        for suffix, theme in THEMES.items():
            ink = theme["ink"]
            inks = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink)
            plain = {"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 11.5, "font.size": 11}
            # Without dates and random ids the same data draws the same bytes.
            with rc_context({**inks, **plain, "svg.hashsalt": name}):
                path = folder / f"{name}{suffix}.svg"
                draw(theme).savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
                paths.append(path)
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws the pictures of the pages under Learn")
    parser.add_argument("--out", type=Path, default=IMAGES, help="the folder to write them to")
    for path in save(parser.parse_args().out):
        print(f"wrote {path}")
