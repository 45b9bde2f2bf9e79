"""The example for MXNet runs as it stands and learns. (What is true of every example is tested with the others.)"""

import re

from tests.examples.run import lines_printed


def test_the_example_learns_and_seldom_skips() -> None:
    closing = re.search(r"loss ([\d.]+) -> ([\d.]+), skipped (\d+) of (\d+)", lines_printed("mxnet_gluon")[-1])
    assert closing is not None
    before, after, skipped, steps = map(float, closing.groups())
    assert after < 0.5 * before
    assert skipped < 0.1 * steps
