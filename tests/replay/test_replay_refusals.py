"""What `replay` refuses, and what it says."""

import math
from typing import Any, ClassVar

import pytest

from gradscale import Dynamic, NoScaling
from gradscale.replay.run import Replay, replay

WRONG = [
    ({}, ValueError, "Received neither"),
    ({"found_inf": []}, ValueError, "at least one step. Received: `found_inf` has 0"),
    (
        {"found_inf": [0, 1], "amax": [1.0]},
        ValueError,
        "one value for each step. Received: `found_inf` has 2, `amax` has 1",
    ),
    ({"found_inf": [0], "loss_finite": [1, 1]}, ValueError, "`loss_finite` has 2"),
    ({"found_inf": [0, 2]}, ValueError, "`found_inf` must hold flags.* Received: 2 at step 1"),
    ({"found_inf": [0, math.nan]}, ValueError, "`found_inf` must hold flags.* Received: nan at step 1"),
    ({"found_inf": ["0", "1"]}, TypeError, "`found_inf` must be a flat sequence of numbers"),
    ({"found_inf": "01"}, ValueError, "`found_inf` must have one value for each step"),
    ({"found_inf": 1}, ValueError, r"Received an array of shape \(\)"),
    ({"found_inf": [[0, 1], [1, 0]]}, ValueError, r"Received an array of shape \(2, 2\)"),
    ({"found_inf": [[0], [1, 0]]}, TypeError, "`found_inf` must be a flat sequence of numbers"),
    ({"found_inf": [None]}, TypeError, "`found_inf` must be a flat sequence of numbers"),
    ({"amax": [1.0, -1.0]}, ValueError, r"`amax` must not be negative. Received: -1.0 at step 1"),
    ({"amax": [1j]}, TypeError, "`amax` must be a flat sequence of numbers"),
    ({"amax": [1.0], "format": "float77"}, ValueError, "float77"),
    ({"found_inf": [0], "upper_share": [-0.5]}, ValueError, "`upper_share` must not be negative"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), WRONG)
def test_wrong_sequences_are_refused(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        replay(Dynamic(), **arguments)


@pytest.mark.parametrize(
    ("policies", "error", "text"),
    [
        ("dynamc", ValueError, "or name one. Received: policy='dynamc': there is no policy of that name"),
        (7, TypeError, "must be a policy or a list of them. Received: 7"),
        (Dynamic, TypeError, "must be a policy or a list of them"),
        ([Dynamic(), 7], TypeError, "must hold policies.* Received: 7 at 1"),
        ([], ValueError, "at least one policy"),
        ({"policy": Dynamic()}, TypeError, "must be a policy or a list of them"),
    ],
)
def test_wrong_policies_are_refused(policies: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        replay(policies, found_inf=[0])


def test_a_policy_that_reads_what_is_not_known_is_refused() -> None:
    class Curious(NoScaling):
        needs: ClassVar[frozenset[str]] = frozenset({"finite", "amax", "upper_share"})

    with pytest.raises(ValueError, match=r"Curious reads `amax` and `upper_share`. Received only: `found_inf`. Pass"):
        replay(Curious(), found_inf=[0])
    assert isinstance(replay(Curious(), found_inf=[0], amax=[1], upper_share=[0.5]), Replay)
