"""From a measurement to what the decision is made from: one answer for every adapter."""

from typing import Any

import numpy as np
import pytest

from gradscale import Dynamic, Headroom, Histogram, NoScaling, Policy, Seen
from gradscale.engine.measurement import Measurement, with_amax
from gradscale.engine.plan import Plan
from gradscale.policies.scalars import SCALARS

SCALE = np.float32(8)
YES, NO = np.bool_(True), np.bool_(False)


def measured(total: float, **known: float) -> Measurement:
    return Measurement(None, np.float32(total), **{name: np.float32(value) for name, value in known.items()})


@pytest.mark.parametrize("xp", [np, SCALARS], ids=["numpy", "scalars"])
def test_sizes_are_divided_by_the_divisor(xp: Any) -> None:
    seen = measured(16.0, amax=12.0, norm=16.0, upper_share=0.25).seen(SCALE, YES, xp)
    assert (seen.finite, seen.loss_finite, seen.amax, seen.norm, seen.upper_share) == (True, True, 1.5, 2.0, 0.25)


@pytest.mark.parametrize("total", [np.inf, np.nan])
def test_after_an_overflow_sizes_are_infinite_and_not_made_up(total: float) -> None:
    seen = measured(total, amax=total, norm=3.0).seen(SCALE, YES, np)
    assert (seen.finite, seen.amax, seen.norm) == (False, np.inf, np.inf)


def test_a_gradient_that_overflows_when_it_is_divided_counts() -> None:
    with np.errstate(over="ignore"):
        assert not measured(3e38).seen(np.float32(0.5), YES, np).finite
    assert measured(3e38).seen(np.float32(1.0), YES, np).finite


def test_an_fp16_gradient_that_leaves_fp16_when_it_is_divided_counts() -> None:
    assert not measured(40000.0, half_amax=40000.0).seen(np.float32(0.5), YES, np).finite
    assert measured(40000.0, half_amax=40000.0).seen(np.float32(1.0), YES, np).finite


def test_a_norm_that_overflows_counts() -> None:
    seen = measured(3.0, amax=3.0, norm=np.inf).seen(SCALE, YES, np)
    assert (seen.finite, seen.amax, seen.norm) == (False, np.inf, np.inf)


def test_an_overflow_elsewhere_counts() -> None:
    assert not measured(1.0).seen(SCALE, YES, np, overflowed=YES).finite
    assert measured(1.0).seen(SCALE, YES, np, overflowed=NO).finite


def test_what_was_not_read_keeps_the_default() -> None:
    assert measured(1.0).seen(SCALE, YES, np) == Seen(finite=YES, loss_finite=YES)


def test_amax_is_estimated_from_the_norm_by_the_last_ratio() -> None:
    seen, ratio = with_amax(Seen(amax=np.float32(2), norm=np.float32(8)), np.float32(1), np, measured=True)
    assert (seen.amax, ratio) == (2, 0.25)
    seen, kept = with_amax(Seen(norm=np.float32(16)), ratio, np, measured=False)
    assert (seen.amax, kept) == (4, 0.25)


@pytest.mark.parametrize(("amax", "norm"), [(np.inf, np.inf), (0.0, 0.0), (1.0, 0.0), (0.0, 1.0)])
def test_a_step_without_a_known_ratio_keeps_the_last(amax: float, norm: float) -> None:
    with np.errstate(all="ignore"):
        seen = Seen(amax=np.float32(amax), norm=np.float32(norm))
        assert with_amax(seen, np.float32(0.5), np, measured=True)[1] == 0.5


def test_an_estimate_is_never_above_the_norm() -> None:
    seen = Seen(amax=np.float32(1.0000001), norm=np.float32(1))
    assert with_amax(seen, np.float32(0.5), np, measured=True)[1] == 1


@pytest.mark.parametrize(
    ("policy", "asked", "plan"),
    [
        (NoScaling(), {}, Plan(False, False, False, None)),
        (Dynamic(), {}, Plan(True, False, False, None)),
        (Dynamic(), {"clip_norm": 1.0}, Plan(True, False, True, None)),
        (Headroom(), {"norm": True}, Plan(True, True, True, None)),
        (Histogram(), {}, Plan(True, False, False, Histogram().edge_magnitude)),
    ],
)
def test_a_plan_reads_what_the_policy_and_the_caller_ask_for(policy: Policy, asked: Any, plan: Plan) -> None:
    assert Plan.of(policy, **asked) == plan
