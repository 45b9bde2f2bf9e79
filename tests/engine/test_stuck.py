"""When a run is stuck, and what its error says."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

from gradscale.engine.culprits import Culprit
from gradscale.engine.health import Progress, ScaleStuck, StuckCheck, Weights, likely_cause
from gradscale.engine.result import Status

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


def check(skips: int, stuck: bool, result: Any, stuck_check: StuckCheck | None = None) -> None:
    loss_finite = result.status() is not Status.NONFINITE_LOSS
    (stuck_check or StuckCheck(3)).check(Progress(10, skips, skips, stuck, loss_finite), result)


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
    def weights() -> None:
        raise AssertionError("measured")

    StuckCheck(3, "ignore").check(Progress(0, 9, 9, stuck=True), Bad(Status.OVERFLOW), weights)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (
            Progress(10, 7, 4, True),
            "4 steps in a row were skipped, since step 14, and no lower scale than 1 can help. ",
        ),
        (
            Progress(0, 4, 4, True),
            "4 steps in a row were skipped, every step so far, and no lower scale than 1 can help. ",
        ),
        (
            Progress(10, 7, 4, False, False),
            "4 steps in a row were skipped, since step 14, and the loss is inf or NaN. ",
        ),
        (
            Progress(10, 7, 4, False, False, last_finite_loss=12),
            "4 steps in a row were skipped, and the loss is inf or NaN since step 13. ",
        ),
    ],
)
def test_the_error_says_since_which_step(progress: Progress, text: str) -> None:
    with pytest.raises(ScaleStuck) as caught:
        StuckCheck(3).check(progress, Bad(Status.OVERFLOW))  # type: ignore[arg-type]
    assert str(caught.value).startswith(text)


def test_the_error_has_a_small_scale_as_a_power_of_two() -> None:
    assert "no lower scale than 2**-24 can help. " in str(ScaleStuck(Progress(10, 7, 4, True), 2.0**-24, [], "..."))


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
        (Status.NONFINITE_LOSS, 1, "the loss itself is inf or NaN"),
        (Status.OVERFLOW, 0, "gradients overflowed that the step did not read"),
        (Status.OVERFLOW, 1, "one parameter, 'layer.0', overflows at any scale"),
        (Status.OVERFLOW, 2, "part of the model overflows"),
        (Status.OVERFLOW, 3, "every gradient is inf or NaN"),
    ],
)
def test_the_cause_follows_from_the_loss_and_the_number_of_bad_parameters(status: Status, bad: int, cause: str) -> None:
    culprits = [Culprit(f"layer.{number}", "inf") for number in range(bad)]
    assert likely_cause(status, culprits, 3).startswith(cause)


def test_a_scale_that_cannot_go_lower_may_be_the_cause_itself() -> None:
    culprits = [Culprit(f"layer.{number}", "inf") for number in range(3)]
    cause = likely_cause(Status.OVERFLOW, culprits, 3, scale=2.0**30)
    assert cause.startswith(
        "the scale, 2**30 at the lowest, may be too high: try a lower one. If that skips too, every"
    )
    assert likely_cause(Status.NONFINITE_LOSS, culprits, 3, scale=2.0**30).startswith("the loss itself is inf or NaN")


def test_the_error_does_not_say_that_no_lower_scale_helps_where_there_is_one() -> None:
    text = str(ScaleStuck(Progress(10, 7, 4, True), 2.0**30, [], "..."))
    assert "and the policy has no scale below 2**30. " in text


def test_the_cause_says_so_where_the_parameters_were_not_recorded() -> None:
    assert "the step did not record which" in likely_cause(Status.OVERFLOW, [], 0)


@pytest.mark.parametrize(
    ("weights", "cause"),
    [
        (Weights(2400.0, "head", 0.25, 30.0), "the learning rate (30) is too high. The largest weight, in head, is "),
        (
            Weights(INF, "head", 0.25),
            "the learning rate is too high. The largest weight, in head, is inf, and was 0.25",
        ),
        (Weights(NAN, "head"), "the learning rate is too high. The largest weight, in head, is nan: the updates"),
        (Weights(NAN, "head", NAN), "the weights of head were inf or NaN before the first step"),
        (Weights(2400.0, "head", 500.0), "the loss itself is inf or NaN"),
        (Weights(8.0, "head", 0.25), "the loss itself is inf or NaN"),
    ],
)
def test_weights_that_have_diverged_point_at_the_learning_rate(weights: Weights, cause: str) -> None:
    assert likely_cause(Status.NONFINITE_LOSS, [], 3, weights, applied=4).startswith(cause)


def test_weights_that_no_step_has_changed_do_not_point_at_the_learning_rate() -> None:
    assert likely_cause(Status.NONFINITE_LOSS, [], 3, Weights(90.0, "head"), applied=0).startswith("the loss itself")


@pytest.mark.parametrize(("applied", "mentioned"), [(0, False), (5, True)])
def test_the_learning_rate_is_mentioned_where_weights_are_not_known_and_have_changed(
    applied: int, mentioned: bool
) -> None:
    cause = likely_cause(Status.NONFINITE_LOSS, [], 3, None, applied)
    assert ("the learning rate is too high" in cause) is mentioned
