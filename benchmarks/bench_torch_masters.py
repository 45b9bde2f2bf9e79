"""One optimizer step of FP16 parameters with float32 masters, against the loop people write by hand.

Claim:    `LossScaler.step(MasterWeights(optimizer), clip_norm=1.0)` takes at most 0.80 of the time of the loop by hand,
          for FP16 parameters, fused AdamW and 25M parameters in 160 tensors; and at most 1.40 of clipping and stepping
          as many float32 parameters with no scaling. Other storages are shown without a goal.
Baseline: by hand: copy the FP16 gradients to float32 ones, unscale them, check that all are finite, clip_grad_norm_,
          step AdamW on the masters, copy the masters back. "FP32" is clip_grad_norm_ and the step, on float32
          parameters.
Machine:  printed with the results; two CPU threads.
Command:  python -m benchmarks.bench_torch_masters [--quick]
Caveats:  gradients are made anew before every repeat, outside the clock. Sides take turns, and medians are compared.
          The loop by hand keeps its float32 gradients between steps, so that it need not allocate them; it looks
          whether the norm is finite, which costs no pass. No backward pass is timed. No GPU was measured.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.alone import run_alone
from benchmarks.cases import CLIP, ELEMENTS, QUICK_SHARE, timed
from benchmarks.rows import Row, compared
from benchmarks.turns import Side
from torch import Tensor, nn

from gradscale import Dynamic
from gradscale.torch import LossScaler, MasterWeights
from gradscale.torch.step.result import SAMPLE_EVERY

SCALE = 2.0**10
STEADY = Dynamic(init_scale=SCALE, growth_interval=10**6)
BY_HAND, FP32 = "by hand", "FP32 parameters"
STORAGES = ("fp32", "remainder", "kahan", "stochastic")
GOALS = {BY_HAND: 0.80, FP32: 1.40}

adamw = partial(torch.optim.AdamW, fused=True)


def sides(tensors: int) -> dict[str, Side]:
    """Returns the ways to make the step, each on parameters of its own."""
    return {
        BY_HAND: by_hand(tensors),
        FP32: float32(tensors),
        "fp32": with_masters(tensors, "fp32"),
        "fp32, FP32 gradients": with_masters(tensors, "fp32", grad_fp32=True),
        **{storage: with_masters(tensors, storage) for storage in STORAGES[1:]},
    }


def by_hand(tensors: int) -> Side:
    """Returns the loop with masters that people write themselves."""
    weights = made(tensors, torch.float16)
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    grads = [torch.empty_like(master) for master in masters]
    optimizer = adamw(masters)

    @torch.no_grad()
    def run() -> None:
        for master, grad, weight in zip(masters, grads, weights, strict=True):
            master.grad = grad.copy_(weight.grad)  # type: ignore[arg-type]
        torch._foreach_mul_(grads, 1 / SCALE)  # pyright: ignore[reportPrivateImportUsage]
        if nn.utils.clip_grad_norm_(masters, CLIP).isfinite():
            optimizer.step()
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)

    return Side(run, partial(give, weights, SCALE))


def float32(tensors: int) -> Side:
    """Returns the step of float32 parameters with clipping and without scaling."""
    weights = made(tensors, torch.float32)
    optimizer = adamw(weights)

    def run() -> None:
        nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()

    return Side(run, partial(give, weights, 1.0))


def with_masters(tensors: int, storage: Any, *, grad_fp32: bool = False) -> Side:
    """Returns the step of a scaler and an optimizer with masters."""
    weights = made(tensors, torch.float16)
    optimizer = MasterWeights(adamw(weights), storage, grad_fp32=grad_fp32)
    scaler = LossScaler(policy=STEADY)

    def prepare() -> None:
        give(weights, SCALE, torch.float32 if grad_fp32 else torch.float16)
        scaler.backward(torch.ones((), requires_grad=True))

    return Side(lambda: scaler.step(optimizer, clip_norm=CLIP), prepare)


def made(tensors: int, dtype: torch.dtype) -> list[nn.Parameter]:
    """Returns new parameters, the same numbers every time."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((torch.randn(ELEMENTS, generator=generator) * 0.02).to(dtype)) for _ in range(tensors)]


def give(weights: Sequence[Tensor], scale: float, dtype: torch.dtype | None = None) -> None:
    """Gives the parameters new gradients, multiplied by the scale."""
    generator = torch.Generator().manual_seed(1)
    true = torch.randn(ELEMENTS, generator=generator) * 1e-3
    for weight in weights:
        weight.grad = None
        weight.grad = (true * scale).to(dtype or weight.dtype)


def rows(quick: bool) -> list[Row]:
    """Returns a row for each storage and baseline."""
    tensors = 160 // QUICK_SHARE if quick else 160
    seconds = timed(partial(sides, tensors), 5 if quick else 2 * SAMPLE_EVERY, quick)
    size = f"{tensors * ELEMENTS / 1e6:g}M in {tensors}"
    storages = [name for name in seconds if name not in GOALS]
    return [
        compared(
            f"MasterWeights, {storage}: step + clip, AdamW fused, {size}",
            baseline,
            seconds[storage],
            seconds[baseline],
            goal if storage == "fp32" else None,
        )
        for storage in storages
        for baseline, goal in GOALS.items()
    ]


if __name__ == "__main__":
    run_alone("A step with master weights", rows)
