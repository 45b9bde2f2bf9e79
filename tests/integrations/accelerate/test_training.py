"""Real training runs in FP16 on the CPU, with the scaler that `install` puts into Accelerate."""

import math
from typing import Any

import pytest
import torch
from tests.integrations.accelerate.run import Run, ours, torchs

from gradscale import CheckOnly, Dynamic

either_optimizer = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])


@either_optimizer
def test_training_in_fp16_learns_and_holds_the_schedule_at_the_skipped_step(fused: bool) -> None:
    run = Run(ours(Dynamic(init_scale=2.0**10, growth_interval=4)), fused=fused).train(4, bad_steps=[5])
    assert run.types == {torch.float16}
    assert run.losses[-1] < 0.5 * run.losses[0]
    assert [index for index, skipped in enumerate(run.skips) if skipped] == [5]
    assert run.schedule_steps == 15
    assert run.scaler.get_scale() == 2.0**10 * 8  # three times four clean steps; the bad loss holds it
    assert all(torch.isfinite(parameter).all() for parameter in run.parameters)


@either_optimizer
def test_weights_are_those_of_a_run_with_torchs_scaler_that_skips_the_same_steps(fused: bool) -> None:
    # Without the schedule, which that run does not hold if the optimizer is fused.
    runs = [Run(place, fused=fused) for place in (ours(), torchs())]
    for run in runs:
        run.scheduler.scheduler.gamma = 1.0
        run.train(2, bad_steps=[5])
    assert all(map(torch.equal, runs[0].parameters, runs[1].parameters))
    # Where a gradient is NaN, so is Accelerate's norm; ours is inf, as in every result.
    norms = [[norm if math.isfinite(norm) else math.inf for norm in run.norms] for run in runs]
    assert norms[0] == norms[1]


@pytest.mark.parametrize("clip", [None, 1.0])
@either_optimizer
def test_overflow_in_one_micro_batch_skips_its_whole_window(fused: bool, clip: float | None) -> None:
    run = Run(ours(), fused=fused, accumulate=2, clip=clip).train(2, bad_steps=[2])
    assert run.skips == [False, True, False, False]
    assert run.schedule_steps == 3
    assert run.scaler.get_scale() == 2.0**9


def test_accumulated_gradients_are_the_mean_of_their_micro_batches() -> None:
    norms = [Run(ours(), accumulate=n).train(1).norms for n in (1, 2)]
    in_float32 = Run(lambda accelerator: None, accumulate=2)
    assert in_float32.train(1).norms == pytest.approx(norms[1], rel=1e-2)
    assert len(norms[0]) == 4
    assert len(norms[1]) == 2


def test_no_scaling_still_computes_in_fp16() -> None:
    run = Run(ours("none")).train(2)
    assert run.types == {torch.float16}
    assert run.skips == [False] * 8
    assert run.losses[-1] < run.losses[0]


@either_optimizer
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(("precision", "computes_in"), [("bf16", torch.bfloat16), ("no", torch.float32)])
def test_check_only_does_not_let_one_inf_end_a_run_without_scaling(
    precision: str, computes_in: torch.dtype, clip: float | None, fused: bool
) -> None:
    how: dict[str, Any] = {"mixed_precision": precision, "fused": fused, "clip": clip}
    without = Run(lambda accelerator: None, **how).train(1, bad_steps=[1])
    assert not all(parameter.isfinite().all() for parameter in without.parameters), "Accelerate's own"
    run = Run(ours(CheckOnly()), **how).train(1, bad_steps=[1])
    assert run.types == {computes_in}
    assert all(parameter.isfinite().all() for parameter in run.parameters)
    assert run.skips == [False, True, False, False]
    assert run.schedule_steps == 3
    assert run.scaler.get_scale() == 1.0


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_check_only_changes_nothing_where_all_is_finite(precision: str) -> None:
    runs = [Run(place, mixed_precision=precision).train(2) for place in (lambda accelerator: None, ours("check_only"))]
    assert all(map(torch.equal, runs[0].parameters, runs[1].parameters))
    assert runs[0].norms == runs[1].norms
