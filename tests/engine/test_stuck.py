"""When a run is stuck, and what its error says."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gradscale.engine.culprits import Culprit
from gradscale.engine.health import Evidence, Finding, ScaleStuck, StuckCheck, Weights, diagnosis
from gradscale.engine.result import Status
from gradscale.policies.contract import ScaleState

INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Bad:
    """A result that knows its non-finite parameters."""

    state: Status
    bad: tuple[Culprit, ...] = ()
    parameters: int = 4
    next_scale: float = 1.0

    @property
    def attempted(self) -> bool:
        return self.state is not Status.NO_GRADS

    def status(self) -> Status:
        return self.state

    def culprits(self) -> tuple[Culprit, ...]:
        return self.bad


def state(applied: int, skips: int, stuck: bool) -> ScaleState:
    counts = {"applied": np.int32(applied), "skipped": np.int32(skips), "consecutive_skips": np.int32(skips)}
    return ScaleState(scale=np.float32(1), stuck=np.bool_(stuck), **counts)


def check(skips: int, stuck: bool, result: Any, stuck_check: StuckCheck | None = None) -> None:
    loss_finite = result.status() is not Status.NONFINITE_LOSS
    (stuck_check or StuckCheck(3)).check(state(10, skips, stuck), result, loss_finite)


def stuck(status: Status, culprits: int = 0, parameters: int = 3, **known: Any) -> Finding:
    """Returns what is found of a run that is stuck."""
    bad = [Culprit(f"layer.{number}", "inf") for number in range(culprits)]
    found: dict[str, Any] = {"scale": 1.0, "applied": 0, "skipped": 9, "consecutive_skips": 9, "stuck": True}
    return diagnosis(Evidence(**found | {"status": status, "culprits": bad, "parameters": parameters} | known))


@pytest.mark.parametrize(
    ("skips", "stuck", "status"),
    [(2, True, Status.OVERFLOW), (3, False, Status.OVERFLOW), (3, True, Status.NO_GRADS), (0, True, Status.APPLIED)],
)
def test_a_run_with_a_way_on_is_not_stuck(skips: int, stuck: bool, status: Status) -> None:
    check(skips, stuck, Bad(status))


@pytest.mark.parametrize(("stuck", "status"), [(True, Status.OVERFLOW), (False, Status.NONFINITE_LOSS)])
def test_a_run_is_stuck_with_no_lower_scale_to_try_or_with_a_bad_loss(stuck: bool, status: Status) -> None:
    with pytest.raises(ScaleStuck, match="3 steps in a row were skipped"):
        check(3, stuck, Bad(status))


def test_the_error_names_five_parameters_and_counts_the_rest() -> None:
    bad = tuple(Culprit(f"layer.{number}", "inf") for number in range(7))
    with pytest.raises(ScaleStuck, match=r"layer\.0 \(inf\), .*layer\.4 \(inf\) and 2 more\.$") as caught:
        check(3, True, Bad(Status.OVERFLOW, bad, 9))
    assert caught.value.culprits == list(bad)


def test_a_function_is_called_once_until_a_step_is_applied_again() -> None:
    calls: list[ScaleStuck] = []
    stuck_check = StuckCheck(3, calls.append)
    for skips in (3, 4, 5, 0, 3):
        check(skips, True, Bad(Status.OVERFLOW), stuck_check)
    assert len(calls) == 2


def test_a_run_that_is_to_be_ignored_is_neither_reported_nor_measured() -> None:
    def more() -> None:
        raise AssertionError("measured")

    StuckCheck(3, "ignore").check(state(0, 9, True), Bad(Status.OVERFLOW), True, more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("applied", "skips", "status", "last_finite_loss", "text"),
    [
        (13, 4, Status.OVERFLOW, None, ", since step 14, and no lower scale than 1 can help. "),
        (0, 4, Status.OVERFLOW, None, ", every step so far, and no lower scale than 1 can help. "),
        (13, 4, Status.NONFINITE_LOSS, None, ", since step 14, and the loss is inf or NaN. "),
        (13, 4, Status.NONFINITE_LOSS, 12, ", and the loss is inf or NaN since step 13. "),
    ],
)
def test_the_error_says_since_which_step(
    applied: int, skips: int, status: Status, last_finite_loss: int | None, text: str
) -> None:
    known = {"last_finite_loss": last_finite_loss}
    bad: Any = Bad(status)
    with pytest.raises(ScaleStuck) as caught:
        StuckCheck(3).check(state(applied, skips, True), bad, status is Status.OVERFLOW, lambda: known)
    assert str(caught.value).startswith(f"4 steps in a row were skipped{text}")


def test_the_error_has_a_small_scale_as_a_power_of_two() -> None:
    error = ScaleStuck(Evidence(2.0**-24, 10, 7, 4, True, status=Status.OVERFLOW))
    assert "no lower scale than 2**-24 can help. " in str(error)


def test_gradients_are_not_mentioned_where_none_is_known() -> None:
    with pytest.raises(ScaleStuck) as caught:
        check(3, False, Bad(Status.NONFINITE_LOSS))
    assert "Gradients that were not finite" not in str(caught.value)


def test_a_warning_names_the_callers_line() -> None:
    with pytest.warns(UserWarning, match="5 steps in a row") as caught:
        check(5, True, Bad(Status.OVERFLOW), StuckCheck(3, "warn"))
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("arguments", "error"), [((0,), ValueError), ((True,), TypeError), ((2.5,), TypeError), ((3, "shout"), ValueError)]
)
def test_settings_that_cannot_be_meant_are_refused(arguments: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error, match="Received"):
        StuckCheck(*arguments)


@pytest.mark.parametrize(
    ("status", "bad", "cause"),
    [
        (Status.NONFINITE_LOSS, 1, "No scale, retry or policy can help"),
        (Status.OVERFLOW, 0, "Gradients overflowed that the step did not read."),
        (Status.OVERFLOW, 1, "The gradient of one parameter, 'layer.0', overflows."),
        (Status.OVERFLOW, 2, "2 of 3 gradients overflow. Likely cause: part of the model overflows"),
        (Status.OVERFLOW, 3, "Every gradient is inf or NaN although the loss is finite. Likely cause: a division, a"),
    ],
)
def test_the_cause_follows_from_the_loss_and_the_number_of_bad_parameters(status: Status, bad: int, cause: str) -> None:
    assert str(stuck(status, bad)).startswith(cause)


def test_a_scale_that_cannot_go_lower_may_be_the_cause_itself() -> None:
    cause = str(stuck(Status.OVERFLOW, 3, scale=2.0**30))
    assert "Likely cause: the scale, 2**30 at the lowest, is too high or a division, a sqrt" in cause
    assert cause.endswith("Try a lower one.")
    assert "2**30" not in str(stuck(Status.NONFINITE_LOSS, 3, scale=2.0**30))


def test_the_error_does_not_say_that_no_lower_scale_helps_where_there_is_one() -> None:
    text = str(ScaleStuck(Evidence(2.0**30, 10, 7, 4, True, status=Status.OVERFLOW)))
    assert "and the policy has no scale below 2**30. " in text


def test_the_cause_says_so_where_the_parameters_were_not_recorded() -> None:
    assert "the step did not record which" in str(stuck(Status.OVERFLOW, parameters=0))


@pytest.mark.parametrize(
    ("weights", "cause"),
    [
        (
            Weights(2400.0, "head", 0.25, 30.0),
            "The largest weight, in head, is 2.4e+03 after 4 updates, and was 0.25 before the first step. "
            "Likely cause: the learning rate (30) is too high, or something other than the optimizer writes",
        ),
        (
            Weights(2400.0, "head", 0.25, 30.0, reach=300.0),
            "The largest weight, in head, is 2.4e+03 after 4 updates, and was 0.25 before the first step. At this "
            "learning rate (30) an update moves a weight by 3e+02 at most. Likely cause: something other than",
        ),
        (
            Weights(900.0, "head", 0.25, 30.0, reach=300.0),
            "The largest weight, in head, is 900 after 4 updates, and was 0.25 before the first step. Likely cause: "
            "the learning rate (30) is too high. ",
        ),
        (Weights(INF, "head", 0.25), "The largest weight, in head, is inf after 4 updates, and was 0.25 before"),
        (Weights(NAN, "head"), "The largest weight, in head, is nan after 4 updates. Likely cause: the learning rate"),
        (
            Weights(NAN, "head", 0.25, zero_eps=(1e-8, "float16")),
            "The largest weight, in head, is nan after 4 updates, and was 0.25 before the first step. The optimizer's "
            "eps of 1e-08 is 0 in its float16 state: where gradients are zero it divides by 0. Use a larger eps. Keep",
        ),
        (Weights(NAN, "head", NAN), "The weights of head were inf or NaN before the first step."),
        (Weights(2400.0, "head", 500.0), "No scale, retry or policy can help"),
        (Weights(8.0, "head", 0.25), "No scale, retry or policy can help"),
    ],
)
def test_weights_that_have_diverged_are_known_before_a_cause_is_suspected(weights: Weights, cause: str) -> None:
    assert str(stuck(Status.NONFINITE_LOSS, weights=weights, applied=4)).startswith(cause)


def test_weights_that_no_step_has_changed_do_not_point_at_the_learning_rate() -> None:
    assert "learning rate" not in str(stuck(Status.NONFINITE_LOSS, weights=Weights(90.0, "head")))


def test_the_learning_rate_is_not_mentioned_where_weights_are_not_known() -> None:
    assert "learning rate" not in str(stuck(Status.NONFINITE_LOSS, applied=5))
