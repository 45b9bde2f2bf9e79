"""Who was to blame, from one number for each gradient."""

import math

from gradscale.engine.culprits import Culprit, culprits_of


def test_gradients_that_are_not_finite_are_named_in_their_order() -> None:
    found = culprits_of(["a", "b", "c", "d"], [math.inf, 1.0, math.nan, -math.inf])
    assert found == [Culprit("a", "inf"), Culprit("c", "nan"), Culprit("d", "inf")]


def test_nobody_is_to_blame_where_nothing_was_checked() -> None:
    assert culprits_of(["a", "b"], []) == []
