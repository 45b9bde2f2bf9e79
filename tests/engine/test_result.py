"""The result contract: status, skips and non-finite parameters from the fields that every adapter fills."""

import inspect
import pickle
import re

import numpy as np
import pytest

from gradscale import Status
from gradscale.engine.culprits import Culprit
from gradscale.engine.hints import OF_RESULT
from gradscale.engine.result import StepResult


@pytest.mark.parametrize(
    ("applied", "loss_finite", "attempted", "status"),
    [
        (True, True, True, Status.APPLIED),
        (False, True, True, Status.OVERFLOW),
        (False, False, True, Status.NONFINITE_LOSS),
        (False, True, False, Status.NO_GRADS),
    ],
)
def test_the_status_follows_from_the_flags(applied: bool, loss_finite: bool, attempted: bool, status: Status) -> None:
    result = StepResult(applied=applied, scale=8.0, next_scale=8.0, loss_finite=loss_finite, attempted=attempted)
    assert result.status() is status
    assert result.skipped() is not applied


def test_what_was_not_measured_is_none() -> None:
    result = StepResult(applied=True, scale=8.0, next_scale=8.0)
    assert (result.grad_norm, result.amax, result.retries, result.culprits()) == (None, None, 0, [])


def test_non_finite_parameters_are_named_with_their_kind_and_count() -> None:
    sizes = np.array([1.0, np.inf, np.nan])
    result = StepResult(applied=False, scale=8.0, next_scale=4.0, sizes=sizes, counts=(0, 3, 1), names=("a", "b", "c"))
    assert result.culprits() == [Culprit("b", "inf", 3), Culprit("c", "nan", 1)]
    assert result.parameters == 3


def test_counts_are_none_where_nobody_counted() -> None:
    result = StepResult(applied=False, scale=8.0, next_scale=4.0, sizes=np.array([np.inf]), names=("a",))
    assert result.culprits() == [Culprit("a", "inf", None)]


def test_a_result_is_shown_with_its_status_and_scales() -> None:
    result = StepResult(applied=np.bool_(False), scale=np.float32(8), next_scale=4.0, grad_norm=np.inf, retries=2)
    assert repr(result) == "StepResult(status=overflow, scale=8.0, next_scale=4.0, grad_norm=inf, retries=2)"
    nothing = StepResult(applied=False, scale=8.0, next_scale=8.0, attempted=False)
    assert repr(nothing) == "StepResult(status=no_grads, scale=8.0, next_scale=8.0)"


def test_a_result_has_no_truth_value() -> None:
    with pytest.raises(TypeError, match=r"neither true nor false\. Use `result\.skipped\(\)`, which may synchronize"):
        bool(StepResult(applied=True, scale=8.0, next_scale=8.0))


@pytest.mark.parametrize("name", ["skipped", "status", "culprits"])
def test_a_method_that_is_not_called_has_no_truth_value_and_equals_no_result(name: str) -> None:
    method = getattr(StepResult(applied=True, scale=8.0, next_scale=8.0), name)
    with pytest.raises(TypeError, match=rf"^`{name}` is a method, which has no truth value\. Call it: `result\.{name}"):
        bool(method)
    for value in (True, Status.APPLIED, []):
        with pytest.raises(TypeError, match=rf"is never equal to .*\. Call it: `result\.{name}\(\)`\.$"):
            assert method != value
    assert method == method
    assert len({method, None}) == 2


def test_a_method_is_documented_inspected_and_pickled_as_any_other() -> None:
    result = StepResult(applied=False, scale=8.0, next_scale=8.0)
    assert inspect.isfunction(StepResult.skipped)
    assert str(inspect.signature(result.skipped)) == "() -> bool"
    assert inspect.getdoc(StepResult.skipped)
    assert pickle.loads(pickle.dumps(result)).skipped() is True
    assert pickle.loads(pickle.dumps(result.skipped))() is True


@pytest.mark.parametrize("name", OF_RESULT)
def test_a_name_of_another_scaler_is_answered_with_what_the_result_has(name: str) -> None:
    result = StepResult(applied=True, scale=8.0, next_scale=8.0)
    with pytest.raises(AttributeError, match=rf"^'StepResult' object has no attribute '{name}'\. Use `") as caught:
        getattr(result, name)
    mentioned = re.findall(r"`(?:not )?result\.(\w+)", str(caught.value))
    assert mentioned
    assert all(hasattr(result, one) for one in mentioned)
    assert not hasattr(result, name)


def test_a_result_holds_its_fields_only() -> None:
    with pytest.raises(AttributeError):
        StepResult(applied=True, scale=8.0, next_scale=8.0).no_such_field = 1  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
