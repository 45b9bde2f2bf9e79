"""Every documented difference is there. One that is not must go from the adapter, and its cases come back."""

import math

import numpy as np
import pytest
from tests.conformance.adapters import Adapter, Difference, Session

from gradscale import Dynamic, NoScaling

GRAD = {"weight": np.array([8.0], np.float32)}


def opened(adapter: Adapter, difference: Difference, size: int = 1) -> Session:
    if difference not in adapter.differs:
        pytest.skip("no such difference")
    policy = NoScaling() if difference in ("no scaling", "infinite norm") else Dynamic(init_scale=8.0)
    return adapter.open(policy, {"weight": np.zeros(size, np.float32)}, lr=0.125)


def test_finite_gradients_are_applied_whatever_the_loss(adapter: Adapter) -> None:
    step = opened(adapter, "losses").step(GRAD, loss=math.inf)
    assert step.reported is not None
    assert step.reported.applied is True
    assert step.reported.loss_finite is False


def test_a_step_without_gradients_raises(adapter: Adapter) -> None:
    session = opened(adapter, "no grads")
    with pytest.raises((AssertionError, ValueError), match=r"[Nn]o inf checks were recorded|gradient"):
        session.step({"weight": None})


def test_no_scaling_switches_it_off(adapter: Adapter) -> None:
    session = opened(adapter, "no scaling")
    step = session.step({"weight": np.array([math.inf], np.float32)})
    assert step.reported is None
    assert step.params["weight"].tolist() == [-math.inf]


def test_the_result_has_no_norm_where_the_user_clips(adapter: Adapter) -> None:
    step = opened(adapter, "norm").step(GRAD, clip_norm=0.5)
    assert step.reported is not None
    assert step.reported.grad_norm is None


def test_an_infinite_norm_makes_every_gradient_nan_where_the_framework_clips(adapter: Adapter) -> None:
    session = opened(adapter, "infinite norm", size=2)
    step = session.step({"weight": np.array([math.inf, 8.0], np.float32)}, clip_norm=5.0)
    assert np.isnan(step.params["weight"]).tolist() == [True, True]


def test_there_is_no_result(adapter: Adapter) -> None:
    assert opened(adapter, "result").step(GRAD).reported is None


def test_the_state_is_the_scale_and_the_clean_steps(adapter: Adapter) -> None:
    session = opened(adapter, "state")
    session.step(GRAD)
    assert session.state() == {"scale": 8.0, "clean_steps": 1}


def test_there_are_no_metrics(adapter: Adapter) -> None:
    assert opened(adapter, "metrics").metrics() is None
