"""When a run is stuck, and what its error says."""

from dataclasses import dataclass
from typing import Any

import pytest

from gradscale.engine.culprits import Culprit
from gradscale.engine.result import Status
from gradscale.engine.stuck import ScaleStuck, StuckCheck, likely_cause


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
    (stuck_check or StuckCheck(3)).check(skips, stuck, result.status() is not Status.NONFINITE_LOSS, result)


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


def test_the_cause_says_so_where_the_parameters_were_not_recorded() -> None:
    assert "the step did not record which" in likely_cause(Status.OVERFLOW, [], 0)
