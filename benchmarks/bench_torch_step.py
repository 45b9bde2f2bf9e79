"""One optimizer step with loss scaling, against torch's scaler and against no scaling at all.

Claim:    `LossScaler.step(optimizer, clip_norm=1.0)` takes at most 0.70 of the time of torch's `GradScaler` with
          `clip_grad_norm_`, for fused AdamW and 25M parameters in 160 tensors.
Baseline: torch.amp.GradScaler: unscale_, clip_grad_norm_, step, update; without clipping step, update. The drop-in
          makes the same calls. "bare" is clip_grad_norm_ and the optimizer's step, unscaled.
Machine:  printed with the results; two CPU threads.
Command:  python benchmarks/bench_torch_step.py [--quick]
Caveats:  gradients are restored before every repeat, outside the clock, so that nothing decays into subnormals. Sides
          take turns, and medians are compared: a busy machine makes all of them slower, fused kernels most. No backward
          pass is timed. No GPU was measured.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradscale import Dynamic
from gradscale.torch import GradScaler, LossScaler

CLAIM = 0.70
SCALE = 2.0**16
NEVER = 10**6
Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Case:
    """What is stepped, and whether its gradients are clipped."""

    name: str
    shape: tuple[int, ...]
    tensors: int
    make: Callable[[list[Tensor]], Optimizer]
    clip: float | None
    claimed: bool = False


def adamw(parameters: list[Tensor]) -> Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def adamw_foreach(parameters: list[Tensor]) -> Optimizer:
    return torch.optim.AdamW(parameters, foreach=True)


def sgd(parameters: list[Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


LARGE, SMALL = (156_250,), (64, 64)
CASES = (
    Case("AdamW fused, 25M in 160, clip", LARGE, 160, adamw, 1.0, claimed=True),
    Case("AdamW fused, 25M in 160", LARGE, 160, adamw, None),
    Case("SGD fused, 25M in 160, clip", LARGE, 160, sgd, 1.0),
    Case("AdamW foreach, 25M in 160, clip", LARGE, 160, adamw_foreach, 1.0),
    Case("AdamW fused, 1,000 of 64x64, clip", SMALL, 1_000, adamw, 1.0),
    Case("AdamW fused, 1,000 of 64x64", SMALL, 1_000, adamw, None),
)


@dataclass
class Side:
    """One way to make the step, on parameters of its own."""

    parameters: list[Tensor]
    optimizer: Optimizer
    prepare: Callable[[], object]
    step: Callable[[], object]
    times: list[float] = field(default_factory=list)

    def run(self, gradients: list[Tensor]) -> None:
        """Makes one step with these gradients, and notes how long it took."""
        for parameter in self.parameters:
            parameter.grad = None
        self.prepare()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        start = time.perf_counter()
        self.step()
        self.times.append(time.perf_counter() - start)


def own(case: Case) -> tuple[list[Tensor], Optimizer]:
    """Returns parameters and an optimizer that no other side shares."""
    generator = torch.Generator().manual_seed(0)
    parameters: list[Tensor] = [
        torch.nn.Parameter(torch.randn(case.shape, generator=generator) * 0.02) for _ in range(case.tensors)
    ]
    return parameters, case.make(parameters)


def bare(case: Case) -> Side:
    """Returns the side that does not scale."""
    parameters, optimizer = own(case)

    def step() -> None:
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, case.clip)
        optimizer.step()

    return Side(parameters, optimizer, lambda: None, step)


def with_grad_scaler(case: Case, kind: type[torch.amp.GradScaler]) -> Side:
    """Returns the side of torch's scaler, or of the drop-in, called in torch's order."""
    parameters, optimizer = own(case)
    scaler = kind("cpu", init_scale=SCALE, growth_interval=NEVER)

    def step() -> None:
        if case.clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, case.clip)
        scaler.step(optimizer)
        scaler.update()

    return Side(parameters, optimizer, lambda: scaler.scale(torch.ones(())), step)


def with_loss_scaler(case: Case) -> Side:
    """Returns the side of `LossScaler`."""
    parameters, optimizer = own(case)
    scaler = LossScaler(policy=Dynamic(init_scale=SCALE, growth_interval=NEVER))

    def prepare() -> None:
        scaler.backward(torch.ones((), requires_grad=True))

    return Side(parameters, optimizer, prepare, lambda: scaler.step(optimizer, clip_norm=case.clip))


def measure(case: Case, repeats: int) -> dict[str, float]:
    """Returns the median seconds of every side, measured in turn."""
    sides = {
        "torch": with_grad_scaler(case, torch.amp.GradScaler),
        "LossScaler": with_loss_scaler(case),
        "drop-in": with_grad_scaler(case, GradScaler),
        "bare": bare(case),
    }
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(case.shape, generator=generator) * 1e-3 for _ in range(case.tensors)]
    scaled = [gradient * SCALE for gradient in gradients]
    for _ in range(repeats + 2):  # the first two warm up
        for name, side in sides.items():
            side.run(gradients if name == "bare" else scaled)
    return {name: statistics.median(side.times[2:]) for name, side in sides.items()}


def main() -> None:
    """Measures, and prints one line for each case."""
    parser = argparse.ArgumentParser(description="Speed of a step with loss scaling")
    parser.add_argument("--quick", action="store_true", help="few repeats: a check that it runs")
    quick = parser.parse_args().quick
    torch.set_num_threads(2)
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, 2 threads, CPU")
    print(f"{'case':<34} {'torch, ms':>10} {'LossScaler':>11} {'drop-in':>8} {'bare':>8}   (last three: times torch)")
    for case in CASES:
        seconds = measure(case, 3 if quick else 25)
        ratios = {name: value / seconds["torch"] for name, value in seconds.items()}
        print(
            f"{case.name:<34} {seconds['torch'] * 1e3:>10.1f} {ratios['LossScaler']:>11.2f} "
            f"{ratios['drop-in']:>8.2f} {ratios['bare']:>8.2f}"
        )
        if case.claimed and not quick:
            print(f"{'':<34} the claim of {CLAIM:.2f} is {'met' if ratios['LossScaler'] <= CLAIM else 'MISSED'}")


if __name__ == "__main__":
    main()
