"""The example of Ray Train runs as it stands and learns, in the environment that `make test-slow` makes for it."""

import pytest
from tests.examples.run import lines_printed
from tests.examples.test_examples import check_closing

pytest.importorskip("ray")


def test_the_workers_of_the_example_skip_together_and_learn() -> None:
    # The example raises if workers end with other weights.
    last_line = lines_printed("ray_train")[-1]
    assert "skipped 1 of 80 steps" in last_line
    check_closing(last_line)
