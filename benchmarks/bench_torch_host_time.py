"""How long the host is busy with the scaler's part of a step on a device, where it only launches.

Claim:    none: it shows what the fewer launches of `LossScaler` cost in Python, for users whose host is what they wait
          for. The scaler's part is to scale, check, unscale, clip, skip and to find the next scale.
Baseline: torch's `GradScaler` and `clip_grad_norm_`, called in torch's order, in the same process.
Machine:  printed with the results. One process, on a simulated device; no GPU.
Command:  python -m benchmarks.bench_torch_host_time [--quick]
Caveats:  CPU time of the process, as nothing waits: other programs do not count, though they empty its caches.
          Operators give the same numbers again and compute nothing: Python and torch's dispatcher are left. Each goes
          through a function in Python in place of a launch. The time of the same loop without a scaler is taken off
          all sides. The rule is one operator in `LossScaler`, as with its kernel, whose launcher in Triton is not
          timed. No GPU was measured.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from benchmarks.alone import run_alone
from benchmarks.cases import CLIP
from benchmarks.rows import Row, compared
from benchmarks.timing import timed
from benchmarks.turns import Side
from torch import Tensor

from gradscale.torch import GradScaler, LossScaler

TORCH, BARE = "torch GradScaler", "no scaling"
BLOCK = 20
"""Turns whose median is one repeat: a single one, of a fraction of a millisecond, depends on what ran before it."""

DYNAMIC, AUTO, DROP_IN = "LossScaler, dynamic", "LossScaler, auto", "drop-in"

Step = Callable[[Any, torch.optim.Optimizer, Sequence[Tensor]], object]


@dataclass(frozen=True)
class HostSide(Side):
    """A side that is timed by what its threads take of the processor: nothing waits, and other programs may run."""

    def turn(self) -> float:
        self.prepare()
        start = time.process_time()
        self.run()
        return time.process_time() - start


def sides(tensors: int, clip: float | None) -> dict[str, Side]:
    """Returns the loop with each scaler, and without one."""

    def ours(scaler: LossScaler, optimizer: torch.optim.Optimizer, _: Sequence[Tensor]) -> None:
        scaler.step(optimizer, clip_norm=clip)

    def torchs(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        scaler.step(optimizer)
        scaler.update()

    def drop_in(scaler: GradScaler, optimizer: torch.optim.Optimizer, _: Sequence[Tensor]) -> None:
        scaler.step(optimizer, **({} if clip is None else {"clip_norm": clip}))
        scaler.update()

    def bare(_: None, optimizer: torch.optim.Optimizer, __: Sequence[Tensor]) -> None:
        optimizer.step()

    return {
        TORCH: side(tensors, torch.amp.GradScaler("sim"), torchs),
        DYNAMIC: side(tensors, LossScaler(policy="dynamic"), ours),
        AUTO: side(tensors, LossScaler(), ours),
        DROP_IN: side(tensors, GradScaler("sim"), drop_in),
        BARE: side(tensors, None, bare),
    }


def side(tensors: int, scaler: Any, step: Step) -> Side:
    """Returns a side whose turn is a loss, scaled and differentiated, whose gradients are given, and a step."""
    parameters = [torch.nn.Parameter(torch.ones(2, device="sim")) for _ in range(tensors)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    made = [torch.ones(2, device="sim") for _ in range(tensors)]
    ready: list[Any] = []

    def prepare() -> None:
        ready[:] = torch.ones((), device="sim", requires_grad=True), [each.detach() for each in made]

    def run() -> None:
        loss, gradients = ready
        (loss * 1.0 if scaler is None else scaler.scale(loss)).backward()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        step(scaler, optimizer, parameters)
        optimizer.zero_grad()

    return HostSide(run, prepare)


def part_of_the_scaler(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Returns the seconds without those of the loop that does not scale: the median of each `BLOCK` turns."""
    blocks = {
        name: [median(turns[start : start + BLOCK]) for start in range(0, len(turns) - BLOCK + 1, BLOCK)]
        for name, turns in seconds.items()
    }
    alone = median(blocks[BARE])
    return {name: [turn - alone for turn in turns] for name, turns in blocks.items()}


def rows_here(quick: bool) -> list[Row]:
    """Returns a row for each scaler, number of tensors, and with clipping or not. In a process with the device."""
    found: list[Row] = []
    for tensors in (20, 200):
        for clip in (CLIP, None):
            seconds = part_of_the_scaler(timed(partial(sides, tensors, clip), 40 if quick else 400, quick, 40))
            what = f"host time, {'step' if clip is None else 'step + clip'}, AdamW fused, {tensors} tensors"
            found += [
                compared(f"{name}: {what}", TORCH, seconds[name], seconds[TORCH]) for name in (DYNAMIC, AUTO, DROP_IN)
            ]
    return found


def rows(quick: bool) -> list[Row]:
    """Returns the rows, measured in a process of their own: torch has one place for a device of others."""
    command = [sys.executable, "-m", "benchmarks.bench_torch_host_time", "--child", *(["--quick"] if quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return [Row(**{**values, **{name: tuple(values[name]) for name in ("quartiles", "seconds")}}) for values in found]


if __name__ == "__main__":
    if "--child" in sys.argv:
        from benchmarks import stubbed

        stubbed.install()
        print(json.dumps([asdict(row) for row in rows_here("--quick" in sys.argv)]))
    else:
        run_alone("How long the host is busy with a scaler", rows)
