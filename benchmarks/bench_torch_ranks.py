"""One optimizer step with loss scaling and clipping on several ranks, against torch's scaler.

Claim:    on 2 and 4 ranks `LossScaler.step(optimizer, clip_norm=1.0)` takes at most as long as torch's `GradScaler`
          with `clip_grad_norm_`, under DDP and under FSDP2, for fused AdamW.
Baseline: torch.amp.GradScaler: unscale_, clip_grad_norm_, step, update.
Machine:  printed with the results. One CPU thread for each rank, gloo, all ranks on this machine.
Command:  python -m benchmarks.bench_torch_ranks [--quick]
Caveats:  a turn is timed from a barrier until the slowest rank has finished. The backward pass, which reduces the
          gradients, is not timed. Gradients are the same at every step, and no step overflows. With more ranks than
          cores, ranks wait for each other's turn on a core, on both sides. The all-reduces stay on one machine: on a
          network each takes longer, and the side with fewer of them gains. No GPU was measured.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.alone import run_alone
from benchmarks.cases import CLIP, ELEMENTS, QUICK_SHARE, adamw_fused
from benchmarks.rows import Row, compared
from benchmarks.sides import NEVER, SCALE, STEADY
from benchmarks.turns import Side, take_turns
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from gradscale.policies.contract import Policy
from gradscale.torch import LossScaler

GOAL = 1.00
RANKS = (2, 4)
TURNS, SHORT_TURNS = 64, 512
"""Turns of each side, with large tensors and with small ones. A short turn is mostly the wait for a core, which differs
from turn to turn by more than the sides do: it takes many of them to tell."""
TORCH, OURS, PREDICTIVE = "torch GradScaler", "LossScaler", "Headroom"

Wrap = Callable[[nn.Module], Any]
Seconds = dict[str, list[float]]


def _sharded(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


WRAPS: dict[str, Wrap] = {"DDP": nn.parallel.DistributedDataParallel, "FSDP2": _sharded}


class Products(nn.Module):
    """The sum of all parameters times fixed numbers: these are its gradients.

    Args:
        shape: of each parameter.
        count: how many there are.
    """

    def __init__(self, shape: tuple[int, ...], count: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(shape, generator=generator) for _ in range(count)]
        self.values = nn.ParameterList([nn.Parameter(0.02 * each) for each in drawn])
        self.slopes = [1e-3 * each for each in drawn]

    def forward(self) -> Tensor:
        return torch.stack(
            [value.mul(slope).sum() for value, slope in zip(self.values, self.slopes, strict=True)]
        ).sum()


def models(quick: bool) -> dict[str, Callable[[], nn.Module]]:
    """Returns what makes the models, by their size: large tensors, whose arithmetic takes time, and small ones."""
    large = 64 // QUICK_SHARE if quick else 64
    return {
        f"{large * ELEMENTS / 1e6:g}M in {large}": partial(Products, (ELEMENTS,), large),
        "100 of 64x64": partial(Products, (64, 64), 100),
    }


def sides(model: Callable[[], nn.Module], wrap: Wrap) -> dict[str, Side]:
    """Returns the ways to make the step, each on a model of its own."""
    return {
        TORCH: _of_torch(wrap(model())),
        OURS: _of_gradscale(wrap(model()), STEADY),
        PREDICTIVE: _of_gradscale(wrap(model()), "headroom"),
    }


def _of_torch(model: nn.Module) -> Side:
    optimizer = adamw_fused(list(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=NEVER)

    def run() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()

    return Side(run, partial(_prepare, optimizer, lambda: scaler.scale(model()).backward()))


def _of_gradscale(model: nn.Module, policy: Policy | str) -> Side:
    optimizer = adamw_fused(list(model.parameters()))
    scaler = LossScaler(model, policy)
    return Side(
        lambda: scaler.step(optimizer, clip_norm=CLIP),
        partial(_prepare, optimizer, lambda: scaler.backward(model())),
    )


def _prepare(optimizer: torch.optim.Optimizer, backward: Callable[[], object]) -> None:
    """Makes new gradients, and waits for all ranks to have theirs."""
    optimizer.zero_grad()
    backward()
    dist.barrier()


def _measure(rank: int, ranks: int, quick: bool, folder: str) -> None:
    """Measures on this rank, and writes the seconds of the slowest rank in every turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found: dict[str, Seconds] = {}
    turns = dict(zip(models(quick), (TURNS, SHORT_TURNS), strict=True))
    for size, model in models(quick).items():
        for name, wrap in WRAPS.items():
            own = take_turns(sides(model, wrap), 5 if quick else turns[size])
            slowest = torch.tensor(list(own.values()))
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[f"{name} on {ranks} ranks, {size}"] = dict(zip(own, slowest.tolist(), strict=True))
    if rank == 0:
        torch.save(found, f"{folder}/seconds.pt")
    dist.barrier()
    dist.destroy_process_group()


def rows(quick: bool) -> list[Row]:
    """Returns two rows for each model, each way to spread it, and each number of ranks."""
    found: list[Row] = []
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_measure, (ranks, quick, folder), nprocs=ranks)  # pyright: ignore[reportPrivateImportUsage]
            measured: dict[str, Seconds] = torch.load(Path(folder) / "seconds.pt")
        for case, seconds in measured.items():
            for side, goal in ((OURS, GOAL), (PREDICTIVE, None)):
                found.append(compared(f"{side}: step + clip, {case}", TORCH, seconds[side], seconds[TORCH], goal))
    return found


if __name__ == "__main__":
    run_alone("A step on several ranks", rows)
