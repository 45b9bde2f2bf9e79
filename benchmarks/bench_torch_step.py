"""One optimizer step with loss scaling, against torch's scaler and against no scaling at all.

Claim:    `LossScaler.step(optimizer, clip_norm=1.0)` takes at most 0.68 of the time of torch's `GradScaler` with
          `clip_grad_norm_`, for fused AdamW and 25M parameters in 160 tensors, and at most 0.85 of clipping and
          stepping with no scaling. Other optimizers, a thousand small tensors, and steps without clipping have goals of
          their own. The drop-in `GradScaler`, called in torch's order, takes at most 1.02 of torch's in every case.
Baseline: torch.amp.GradScaler: unscale_, clip_grad_norm_, step, update; without clipping step, update. "No scaling" is
          clip_grad_norm_ and the optimizer's step.
Machine:  printed with the results; two CPU threads.
Command:  python -m benchmarks.bench_torch_step [--quick]
Caveats:  gradients are made anew before every repeat, outside the clock, so that nothing decays into subnormals. Sides
          take turns, and medians are compared; the means count the steps, one in sixteen, that read sizes for
          `metrics`. No backward pass is timed. No GPU was measured.
"""

from collections.abc import Mapping
from functools import partial

import torch
from benchmarks.alone import run_alone
from benchmarks.cases import (
    CLIP,
    QUICK_SHARE,
    adagrad_fused,
    adamw_foreach,
    adamw_fused,
    large_case,
    sgd_fused,
    small_case,
    timed,
)
from benchmarks.rows import Row, compared
from benchmarks.sides import Case, bare, grad_scaler, loss_scaler
from benchmarks.turns import Side

from gradscale.torch import GradScaler
from gradscale.torch.step.result import SAMPLE_EVERY

OURS, DROP_IN = "LossScaler", "drop-in"
TORCH, BARE = "torch GradScaler", "no scaling"
DROP_IN_GOAL = 1.02

Goals = Mapping[str, float | None]


def cases(quick: bool) -> list[tuple[Case, Goals]]:
    """Returns what is stepped, and the goals of `LossScaler` against each baseline."""
    many, most = 160 // QUICK_SHARE if quick else 160, 1_000
    return [
        (large_case("AdamW fused", adamw_fused, CLIP, many), {TORCH: 0.68, BARE: 0.85}),
        (large_case("AdamW fused", adamw_fused, None, many), {TORCH: 1.00}),
        (small_case("AdamW fused", adamw_fused, CLIP, most), {TORCH: 0.75, BARE: None}),
        (small_case("AdamW fused", adamw_fused, None, most), {TORCH: 1.00}),
        (large_case("SGD fused", sgd_fused, CLIP, many), {TORCH: 0.65, BARE: None}),
        (large_case("Adagrad fused", adagrad_fused, CLIP, many), {TORCH: 0.65, BARE: None}),
        (large_case("AdamW foreach", adamw_foreach, CLIP, many), {TORCH: 0.97, BARE: None}),
    ]


def sides(case: Case) -> dict[str, Side]:
    """Returns the four ways to make the step."""
    return {
        TORCH: grad_scaler(case, torch.amp.GradScaler),
        OURS: loss_scaler(case),
        DROP_IN: grad_scaler(case, GradScaler),
        BARE: bare(case),
    }


def rows(quick: bool) -> list[Row]:
    """Returns a row for each case and baseline, and one for the drop-in."""
    found: list[Row] = []
    for case, goals in cases(quick):
        seconds = timed(partial(sides, case), 5 if quick else 2 * SAMPLE_EVERY, quick)
        for baseline, goal in goals.items():
            found.append(compared(f"{OURS}: {case.name}", baseline, seconds[OURS], seconds[baseline], goal))
        found.append(compared(f"{DROP_IN}: {case.name}", TORCH, seconds[DROP_IN], seconds[TORCH], DROP_IN_GOAL))
    return found


if __name__ == "__main__":
    run_alone("A step with loss scaling", rows)
