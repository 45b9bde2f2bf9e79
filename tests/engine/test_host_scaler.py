"""What every adapter that decides in host memory shares: the decision, the last result, and the saved form."""

import math
from typing import Any

import numpy as np
import pytest

from gradscale import Dynamic, Headroom, NoScaling, Static, Status
from gradscale.engine.decide import Outcome
from gradscale.engine.health import ScaleStuck
from gradscale.engine.host_scaler import HostScaler
from gradscale.engine.measurement import NOTHING_READ, Measurement
from gradscale.engine.metrics import METRICS
from gradscale.engine.result import StepResult
from gradscale.recording.writer import RunRecorder


class Scaler(HostScaler):
    """A scaler whose gradients are one number: what was measured of them."""

    resets = 0

    def decide(self, size: float, loss_finite: bool = True, **options: Any) -> tuple[Outcome, StepResult]:
        measurement = Measurement(np.array([size]), np.float64(size), amax=np.float64(size), norm=np.float64(size))
        return self._decide(StepResult, measurement, loss_finite=loss_finite, names=("w",), **options)

    def step(self, size: float, **options: Any) -> StepResult:
        outcome, result = self.decide(size, **options)
        self._remember(outcome.state, result)
        return result

    @staticmethod
    def _recorder_of(record: Any) -> RunRecorder:
        return RunRecorder(record, "numpy")

    def _reset(self) -> None:
        self.resets += 1


def test_gradients_are_divided_by_the_scale_or_by_the_divisor() -> None:
    outcome, result = Scaler(Static(8.0)).decide(16.0)
    assert (outcome.factor, result.amax, result.grad_norm, result.scale) == (0.125, 2.0, 2.0, 8.0)
    outcome, result = Scaler(Static(8.0)).decide(16.0, divisor=1.0, clip_norm=4.0)
    assert (result.amax, result.grad_norm, result.scale) == (16.0, 16.0, 8.0)
    assert outcome.factor == pytest.approx(0.25, rel=1e-6)


def test_a_decision_changes_nothing_until_it_is_remembered() -> None:
    scaler = Scaler(Dynamic(init_scale=8.0))
    before = scaler.state
    outcome, result = scaler.decide(math.inf)
    assert (scaler.state is before, scaler.resets) == (True, 1)
    scaler._remember(outcome.state, result)  # pyright: ignore[reportPrivateUsage]
    assert (scaler.loss_scale, scaler.last is result, scaler.resets) == (4.0, True, 2)


@pytest.mark.parametrize("options", [{"size": math.nan}, {"size": 1.0, "overflowed": True}], ids=["here", "elsewhere"])
def test_after_an_overflow_amax_and_norm_are_infinite_for_the_rule_and_in_the_result(options: Any) -> None:
    result = Scaler(Headroom()).step(**options)
    assert (result.status(), result.amax, result.grad_norm) == (Status.OVERFLOW, math.inf, math.inf)


def test_what_was_not_read_is_not_known() -> None:
    outcome, result = Scaler(NoScaling())._decide(StepResult, NOTHING_READ, loss_finite=False)  # pyright: ignore[reportPrivateUsage]
    assert (outcome.applied, result.applied, result.amax, result.grad_norm) == (True, True, None, None)
    assert result.culprits() == []


def test_at_a_scale_of_zero_no_gradient_is_finite() -> None:
    assert Scaler(Static(8.0)).decide(0.0, divisor=0.0)[1].status() is Status.OVERFLOW


def test_a_stuck_run_raises_once_the_step_is_counted() -> None:
    scaler = Scaler(Static(8.0), max_consecutive_skips=1)
    with pytest.raises(ScaleStuck, match="The gradient of one parameter, 'w', overflows"):
        scaler.step(math.inf)
    assert (int(scaler.state.skipped), scaler.resets) == (1, 2)


def test_metrics_have_the_names_of_every_adapter_and_are_plain_numbers() -> None:
    scaler = Scaler()
    assert (tuple(scaler.metrics()), math.isnan(scaler.metrics()["grad_norm"])) == (METRICS, True)
    scaler.step(32.0)
    assert {type(value) for value in scaler.metrics().values()} == {float}
    assert scaler.metrics()["grad_norm"] == 32.0 / 16


def test_loading_replaces_policy_and_state_and_forgets_the_last_result() -> None:
    saved, scaler = Scaler(Dynamic(init_scale=32.0)).state_dict(), Scaler()
    scaler.step(1.0)
    scaler.load_state_dict(saved)
    assert (scaler.policy, scaler.loss_scale, scaler.resets) == (Dynamic(init_scale=32.0), 32.0, 3)
    with pytest.raises(RuntimeError, match="There is a result once a step was taken"):
        _ = scaler.last
