"""What the PyTorch benchmarks step: two kinds of models, a few optimizers, and the way sides are timed."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from benchmarks import timing
from benchmarks.machine import THREADS
from benchmarks.sides import Case
from benchmarks.timing import FEWEST
from benchmarks.turns import Side
from torch import Tensor

CLIP = 1.0

ELEMENTS = 156_250
"""Elements of a large tensor: 160 of them are 25 million."""

QUICK_SHARE = 4
"""By how much `--quick` makes models of large tensors smaller. The tensors keep their size: the same kernels run."""

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
    """Returns the seconds of the sides, as `timing.timed` does, on as many threads of torch as on every machine."""
    torch.set_num_threads(THREADS)
    return timing.timed(make_sides, repeats, quick, fewest)


def _verb(clip: float | None) -> str:
    return "step" if clip is None else "step + clip"
