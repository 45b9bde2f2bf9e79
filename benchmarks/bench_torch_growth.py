"""What a step costs for each parameter, from one million parameters to two hundred.

Claim:    a parameter of a model of 200M costs no more than 1.10 of what one of 25M does, with clipping.
Baseline: torch's `GradScaler` with `clip_grad_norm_`, at every size; and `LossScaler` itself at smaller sizes.
Machine:  printed with the results; two CPU threads. Takes 7 GB of memory, since all sizes take turns.
Command:  python -m benchmarks.bench_torch_growth [--quick] [--plot FILE]
Caveats:  the optimizer is fused SGD without momentum, which has no state and does the least work of its own. In small
          models fixed costs weigh more, and caches help: below 25M there is no goal. No backward pass is timed. No GPU
          was measured.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from benchmarks.alone import run_alone
from benchmarks.cases import CLIP, timed
from benchmarks.plots import draw_growth
from benchmarks.rows import Row, compared
from benchmarks.sides import Case, grad_scaler, loss_scaler
from benchmarks.turns import Side

GOAL = 1.10
GOAL_FROM = 25
"""Millions of parameters from which on neither fixed costs nor caches matter, and growth has a goal."""

ELEMENTS = 125_000
MILLIONS = (1, 5, 25, 100, 200)
OURS, TORCH = "LossScaler", "torch GradScaler"


def case_of(millions: int) -> Case:
    """Returns a model of so many million parameters."""
    tensors = millions * 1_000_000 // ELEMENTS
    make_sgd = partial(torch.optim.SGD, lr=1e-3, fused=True)
    return Case(f"step + clip, SGD fused, {millions}M in {tensors}", [(ELEMENTS,)] * tensors, make_sgd, CLIP)


def sides(sizes: Sequence[int]) -> dict[str, Side]:
    """Returns both scalers at every size: all in one run, since sizes are compared with each other too."""
    found: dict[str, Side] = {}
    for millions in sizes:
        case = case_of(millions)
        found |= {f"{OURS} {millions}": loss_scaler(case), f"{TORCH} {millions}": grad_scaler(case)}
    return found


def rows(quick: bool) -> list[Row]:
    """Returns a row for each size, and rows that compare the largest with the smaller ones."""
    sizes = MILLIONS[:3] if quick else MILLIONS
    seconds = timed(partial(sides, sizes), 3 if quick else 15, quick)
    *smaller, largest = sizes
    return [
        *(cost(millions, seconds) for millions in sizes),
        *(growth(largest, millions, seconds) for millions in smaller),
    ]


def cost(millions: int, seconds: Mapping[str, Sequence[float]]) -> Row:
    """Returns what a parameter costs, beside torch's scaler."""
    own, other = (statistics.median(seconds[f"{name} {millions}"]) * 1e3 / millions for name in (OURS, TORCH))
    benchmark, parameters = f"{OURS}: {case_of(millions).name}", millions * 1_000_000
    return Row(benchmark, TORCH, own, unit="ns/parameter", baseline_measured=other, parameters=parameters)


def growth(larger: int, smaller: int, seconds: Mapping[str, Sequence[float]]) -> Row:
    """Returns how much more a parameter costs in the larger model."""
    of_larger, of_smaller = ([turn / size for turn in seconds[f"{OURS} {size}"]] for size in (larger, smaller))
    goal = GOAL if smaller >= GOAL_FROM else None
    row = compared(f"cost per parameter: {larger}M", f"{smaller}M", of_larger, of_smaller, goal)
    return replace(row, seconds=None)  # they would be those of a million parameters


if __name__ == "__main__":
    run_alone("What a parameter costs", rows, draw_growth)
