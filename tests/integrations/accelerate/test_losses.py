"""Losses that are not finite under Accelerate: a policy keeps its scale, and torch's rule backs off."""

from typing import Any

import pytest
from accelerate.utils import GradScalerKwargs
from tests.integrations.accelerate.run import Run, ours

from gradscale import Status


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("policy", ["auto", "dynamic:init_scale=1024", "histogram:init_scale=1024", "logmax"])
def test_three_losses_that_are_not_finite_leave_the_scale_as_it_is(policy: str, fused: bool) -> None:
    run = Run(ours(policy), fused=fused).train(1)
    scale, before = run.scaler.get_scale(), run.parameters
    run.train(1, bad_steps=[4, 5, 6, 7])
    assert run.skips == [False] * 4 + [True] * 4
    assert run.scaler.last.status() is Status.NONFINITE_LOSS
    assert run.scaler.get_scale() == scale
    assert all(left.equal(right) for left, right in zip(before, run.parameters, strict=True))


def test_numbers_of_the_accelerator_are_torchs_rule() -> None:
    handlers: list[Any] = [GradScalerKwargs(init_scale=1024.0)]
    run = Run(ours(None), kwargs_handlers=handlers).train(1, bad_steps=[1, 2, 3])
    assert run.scaler.get_scale() == 128.0
