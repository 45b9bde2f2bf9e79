"""The parameters with non-finite gradients, from one number for each gradient."""

import math

import numpy as np

from gradscale.engine.culprits import Culprit, count_nonfinite, culprits_of


def test_gradients_that_are_not_finite_are_named_in_their_order() -> None:
    found = culprits_of(["a", "b", "c", "d"], [math.inf, 1.0, math.nan, -math.inf])
    assert found == [Culprit("a", "inf"), Culprit("c", "nan"), Culprit("d", "inf")]


def test_there_are_no_culprits_where_nothing_was_checked() -> None:
    assert culprits_of(["a", "b"], []) == []


def test_elements_are_counted_that_are_not_finite_or_not_once_they_are_multiplied() -> None:
    array = np.array([[1.0, np.inf], [np.nan, 1e30]], np.float32)
    assert (count_nonfinite(array, 1.0), count_nonfinite(array, 2.0**100)) == (2, 3)
    assert count_nonfinite(array, 2.0**100, np.float64) == 2
    assert count_nonfinite(np.array([60000.0, np.inf], np.float16), 2.0) == 1
