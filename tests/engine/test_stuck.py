"""When a run is stuck, and what its error says."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from gradscale import Dynamic
from gradscale.engine.culprits import Culprit
from gradscale.engine.result import Status
from gradscale.engine.stuck import ScaleStuck, check_stuck, likely_cause
from gradscale.policies.contract import ScaleState


@dataclass(frozen=True)
class Step:
    status: Status
    bad: tuple[Culprit, ...] = ()

    def culprits(self) -> tuple[Culprit, ...]:
        return self.bad


def after(skips: int, *, stuck: bool) -> ScaleState:
    return replace(Dynamic().start(), consecutive_skips=np.int32(skips), stuck=np.bool_(stuck))


@pytest.mark.parametrize(
    ("skips", "stuck", "status"),
    [(2, True, Status.OVERFLOW), (3, False, Status.OVERFLOW), (3, True, Status.NO_GRADS), (0, True, Status.APPLIED)],
)
def test_a_run_with_a_way_on_is_not_stuck(skips: int, stuck: bool, status: Status) -> None:
    check_stuck(after(skips, stuck=stuck), 3, Step(status), 4)


@pytest.mark.parametrize(("stuck", "status"), [(True, Status.OVERFLOW), (False, Status.NONFINITE_LOSS)])
def test_a_run_is_stuck_with_no_lower_scale_to_try_or_with_a_bad_loss(stuck: bool, status: Status) -> None:
    with pytest.raises(ScaleStuck, match="3 steps in a row were skipped"):
        check_stuck(after(3, stuck=stuck), 3, Step(status), 4)


def test_the_error_names_five_parameters_and_counts_the_rest() -> None:
    bad = tuple(Culprit(f"layer.{number}", "inf") for number in range(7))
    with pytest.raises(ScaleStuck, match=r"layer\.0 \(inf\), .*layer\.4 \(inf\) and 2 more\.$") as caught:
        check_stuck(after(3, stuck=True), 3, Step(Status.OVERFLOW, bad), 9)
    assert caught.value.culprits == list(bad)


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
def test_the_cause_follows_from_the_loss_and_from_how_many_are_to_blame(status: Status, bad: int, cause: str) -> None:
    culprits = [Culprit(f"layer.{number}", "inf") for number in range(bad)]
    assert likely_cause(status, culprits, 3).startswith(cause)
