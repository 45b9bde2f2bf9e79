"""What the PyTorch benchmarks step: two kinds of models, a few optimizers, and the way sides are timed."""

import gc
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from machine import THREADS
from torch import Tensor

from gradscale.bench.steps import Case
from gradscale.bench.turns import Side, take_turns

CLIP = 1.0

ELEMENTS = 156_250
"""Elements of a large tensor: 160 of them are 25 million."""

QUICK_SHARE = 4
"""By how much `--quick` makes models of large tensors smaller. The tensors keep their size: the same kernels run."""

QUICK_S, FULL_S = 5.0, 60.0
"""Seconds that the rounds of a comparison may take together. With a core taken away, threads that wait for each other
make a step of many tensors up to a hundred times slower."""

FEWEST = 3
"""Rounds that a comparison gets however slow they are."""

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
adamw_fused: MakeOptimizer = partial(torch.optim.AdamW, fused=True)
adamw_foreach: MakeOptimizer = partial(torch.optim.AdamW, foreach=True)
sgd_fused: MakeOptimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
adagrad_fused: MakeOptimizer = partial(torch.optim.Adagrad, fused=True)


def large_case(optimizer: str, make: MakeOptimizer, clip: float | None, tensors: int) -> Case:
    """Returns the case of a model whose tensors are large: the arithmetic is what takes time."""
    size = f"{tensors * ELEMENTS / 1e6:g}M in {tensors}"
    return Case(f"{_verb(clip)}, {optimizer}, {size}", [(ELEMENTS,)] * tensors, make, clip)


def small_case(optimizer: str, make: MakeOptimizer, clip: float | None, tensors: int) -> Case:
    """Returns the case of a model whose tensors are small: Python's loops over them weigh as much."""
    return Case(f"{_verb(clip)}, {optimizer}, {tensors:,} of 64x64", [(64, 64)] * tensors, make, clip)


def timed(
    make_sides: Callable[[], Mapping[str, Side]], repeats: int, quick: bool, fewest: int = FEWEST
) -> dict[str, list[float]]:
    """Returns the seconds of the sides, which take turns; they are made here, and their memory is free afterwards.

    Args:
        make_sides: makes the sides.
        repeats: rounds that count, if the machine is not too busy for them.
        quick: whether to give up sooner on them.
        fewest: rounds that count, however long they take.
    """
    torch.set_num_threads(THREADS)
    gc.collect()
    sides = make_sides()
    affordable = (QUICK_S if quick else FULL_S) / _round_s(sides)
    return take_turns(sides, max(fewest, min(repeats, int(affordable))))


def _round_s(sides: Mapping[str, Side]) -> float:
    """Returns how many seconds it takes until every side has had its turn, preparations included."""
    start = time.perf_counter()
    for side in sides.values():
        side.turn()
    return time.perf_counter() - start


def _verb(clip: float | None) -> str:
    return "step" if clip is None else "step + clip"
