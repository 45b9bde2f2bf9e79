"""Draws how `Headroom` sets the scale, for the page on policies: the rule itself, stepped over made-up gradients.

Command:  python docs/data/draw_headroom.py [--out FOLDER]
Needs:    pip install ".[demo]"
Writes:   docs/images/headroom.png, on white.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from gradscale import FP16, Headroom, Seen

IMAGES = Path(__file__).parents[1] / "images"

STEPS = 8000
LARGE, FITS = 1300, 4
SPIKE, TIMES = 2500, 300
NANS = (5000, 5010, 5020)
"""Where the large gradient, the spike and the bad batches come, and how many times the usual size they are."""

GRADIENTS, TOP, CEILING, SCALE, SKIPPED = "#9a9a9a", "#2f9e77", "#b65c9b", "#0072b2", "#d55e00"

PLAIN = {"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 11, "font.size": 10}


def gradients() -> Any:
    """Returns the largest gradient of each step: smaller by 4 bits after 2,000 steps, with noise and bad batches."""
    noise = np.random.default_rng(0).normal(0, 0.2, STEPS)
    amax = 2.0 ** (-6 - 4 * np.clip(np.arange(STEPS) / 2000, 0, 1) + noise)
    amax[LARGE] = FITS * 2.0 ** (-6 - 4 * LARGE / 2000)
    amax[SPIKE] *= TIMES
    amax[list(NANS)] = np.nan
    return amax.astype(np.float32)


def followed(policy: Headroom, amax: Any) -> dict[str, Any]:
    """Returns, for each step, the scale that it ran at, and the peak and the ceiling that it left."""
    state, rows = policy.start(), []
    for size in amax:
        scale = state.scale
        finite = size * scale <= FP16.max
        state = policy.next(state, Seen(finite=np.bool_(finite), amax=np.float32(size if finite else np.inf)), np)
        rows.append((float(scale), float(state.peak), float(state.ceiling), not finite))
    scales, peaks, ceilings, skipped = (np.array(column) for column in zip(*rows, strict=True))
    return {"scale": scales, "peak": peaks, "ceiling": ceilings, "skipped": np.flatnonzero(skipped)}


def draw() -> Figure:
    """Draws the gradients and their peak, and below them the scale with its two bounds."""
    policy, amax = Headroom(), gradients()
    run = followed(policy, amax)
    steps, skipped, scale = np.arange(STEPS), run["skipped"], np.log2(run["scale"])
    top = np.log2(FP16.max / 2**policy.margin_bits / run["peak"])
    ceiling = np.log2(np.where(run["ceiling"] < policy.max_scale, run["ceiling"], np.nan))
    figure = Figure(figsize=(8.4, 6.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    upper.plot(steps, np.log2(amax), color=GRADIENTS, linewidth=0.5)
    upper.plot(steps, np.log2(run["peak"]), color=TOP, linewidth=1.8)
    upper.set_title("Largest gradient of each step, and its leaky peak", loc="left", fontweight="bold")
    upper.text(2700, -9, "peak: up at once, down slowly", color=TOP)
    upper.text(2700, -11.6, "largest gradient", color="#6a6a6a")
    upper.text(LARGE, -5.6, f"x {FITS}: fits", color=TOP, ha="center")
    upper.text(SPIKE + 80, -2.6, f"x {TIMES}: overflows, not measured", color=SKIPPED)
    upper.text(NANS[-1] + 80, -5.6, "three NaN batches, 10 steps apart", color=SKIPPED)
    for step in NANS:
        upper.axvline(step, color=SKIPPED, linewidth=0.6, ymax=0.6)
    lower.step(steps, top, color=TOP, linewidth=1.8, where="post")
    lower.step(steps, ceiling, color=CEILING, linewidth=1.8, where="post")
    lower.step(steps, scale, color=SCALE, linewidth=2, where="post")
    lower.plot(skipped, scale[skipped], "x", color=SKIPPED, markersize=8, markeredgewidth=2.2)
    lower.set_title("Scale: the largest power of two below top and ceiling", loc="left", fontweight="bold")
    lower.text(3300, 22, "top: format max / 4 / peak", color=TOP)
    lower.text(60, 4.2, "first scale: 16, until a gradient is measured", color=SCALE)
    lower.text(
        2440,
        12.6,
        "overflow: step skipped,\nscale and ceiling 12 bits\nlower (4 soon after another)",
        color=SKIPPED,
        ha="right",
    )
    lower.text(3300, 17.4, "ceiling", color=CEILING)
    lower.text(3300, 14.4, "scale", color=SCALE)
    lower.text(
        5500,
        7.6,
        "each clean step raises the\nceiling by top / 131072, or\ndoubles it where it is\n20 bits below top",
        color=CEILING,
    )
    lower.set_xlabel("step")
    _ticks(upper, range(-12, 1, 4))
    _ticks(lower, range(0, 25, 4))
    upper.set_ylim(-12.5, 0)
    for axes in (upper, lower):
        axes.margins(x=0.01)
        axes.grid(axis="y", linewidth=0.4, color="#dddddd")
    return figure


def _ticks(axes: Any, exponents: Sequence[int]) -> None:
    axes.set_yticks(exponents, [f"$2^{{{exponent}}}$" for exponent in exponents])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws how Headroom sets the scale")
    parser.add_argument("--out", type=Path, default=IMAGES, help="the folder to write it to")
    path = parser.parse_args().out / "headroom.png"
    with rc_context(PLAIN):
        draw().savefig(path, dpi=110, metadata={"Software": None})
    print(f"wrote {path}")
