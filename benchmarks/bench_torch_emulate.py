"""A training step in emulated FP16 and BF16, against the same step under real autocast.

Claim:    forward and backward in emulated FP16 take at most a fifth of the time that FP16 autocast takes on a CPU for
          an MLP 512 wide, and at most half of it for the char-GPT.
Baseline: the same model and batch under `torch.autocast("cpu")`. Float32, without either, shows what rounding costs.
Machine:  printed with the results; two CPU threads.
Command:  python -m benchmarks.bench_torch_emulate [--quick]
Caveats:  few CPUs multiply FP16 matrices; where one does, autocast is many times faster than here. BF16, for which more
          have instructions, has no goal. The optimizer's step is not timed: it is float32 on all sides. With other work
          on both cores, every operation that is shared between threads waits for one of them. Emulation has more
          operations than autocast, so it then loses its lead. No GPU was measured.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from benchmarks.alone import run_alone
from benchmarks.cases import timed
from benchmarks.rows import Row, compared
from benchmarks.turns import Side
from examples.demo.with_torch import GPT
from torch import Tensor, nn

from gradscale.formats import BF16, FP8_E4M3, FP8_E5M2, FP16
from gradscale.torch import emulate

MLP, CHAR_GPT = "MLP 512 wide", "char-GPT 128 wide"
FULL = "float32"

Block = Callable[[], AbstractContextManager[Any]]

BLOCKS: dict[str, Block] = {
    FULL: nullcontext,
    "emulated FP16": partial(emulate, FP16),
    "FP16 autocast": partial(torch.autocast, "cpu", dtype=torch.float16),
    "emulated BF16": partial(emulate, BF16),
    "BF16 autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "emulated FP8": partial(emulate, FP8_E4M3, FP8_E5M2),
}

PAIRS = (
    ("emulated FP16", "FP16 autocast", {MLP: 0.2, CHAR_GPT: 0.5}),
    ("emulated BF16", "BF16 autocast", {}),
    ("emulated FP16", FULL, {}),
    ("emulated FP8", FULL, {}),
)
"""What is compared with what, and the goal for each model that has one."""


def mlp() -> tuple[nn.Module, Tensor]:
    """Returns four layers with GELU between them, and a batch."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(512, 512)), torch.randn(128, 512)


def char_gpt() -> tuple[nn.Module, Tensor]:
    """Returns the GPT of the demo, larger, and a batch of characters."""
    return GPT(vocabulary=96, length=64, width=128, heads=4, depth=4), torch.randint(96, (4, 64))


def sides(make: Callable[[], tuple[nn.Module, Tensor]]) -> dict[str, Side]:
    """Returns forward and backward in every block, on one model."""
    torch.manual_seed(0)
    model, batch = make()

    def run(block: Block) -> None:
        with block():
            result = model(batch)
        result.float().square().mean().backward()
        model.zero_grad()

    return {name: Side(partial(run, block)) for name, block in BLOCKS.items()}


def rows(quick: bool) -> list[Row]:
    """Returns a row for each model and pair."""
    found: list[Row] = []
    for model, make in ((MLP, mlp), (CHAR_GPT, char_gpt)):
        seconds = timed(partial(sides, make), 5 if quick else 40, quick)
        for ours, baseline, goals in PAIRS:
            name = f"{ours}: {model}"
            found.append(compared(name, baseline, seconds[ours], seconds[baseline], goals.get(model)))
    return found


if __name__ == "__main__":
    run_alone("Emulated formats", rows)
