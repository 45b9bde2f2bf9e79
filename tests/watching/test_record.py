"""What every adapter's `watch` shares: the steps that are sampled, and the rows of what was counted."""

import math
from typing import Any

import numpy as np
import pytest

from gradscale.histogram import exponent_histogram
from gradscale.watching.record import Schedule, WatchRecord
from gradscale.watching.rows import Tally, sample_of

FIRST = np.array([3.0, 0.25, 0.0], np.float32)
SECOND = np.array([1.0, np.inf], np.float16)


def record_of(*tensors: tuple[str, np.ndarray, float]) -> WatchRecord:
    """Returns a record of step 7, in which modules have these numbers, unscaled, and the scale that they had."""
    record = WatchRecord(100, None, ["fp16"])
    record._samples[7] = sample_of(
        ((name, "weight_grad"), Tally(exponent_histogram(array), float(abs(array).max()), array.dtype, scale))
        for name, array, scale in tensors
    )
    return record


def test_a_row_has_the_facts_of_one_tensor() -> None:
    row = record_of(("w", FIRST, 1.0), ("v", SECOND, 1.0)).rows()[0]
    assert (row.step, row.name, row.dtype, row.scale, row.elements) == (7, "w", "float32", 1.0, 3)
    assert (row.amax, row.smallest, row.range_bits, row.zeros, row.infs, row.nans) == (3.0, 0.25, 4, 1 / 3, 0, 0)


def test_a_row_has_the_scale_that_its_numbers_had() -> None:
    row = record_of(("w", FIRST, 1.0), ("v", SECOND, 1024.0)).rows()[1]
    assert (row.scale, row.smallest, row.infs, row.amax) == (1024.0, 1.0, 1, math.inf)


def test_several_tensors_of_a_name_are_one_row() -> None:
    (row,) = record_of(("w", FIRST, 1.0), ("w", SECOND, 1.0)).rows()
    assert (row.elements, row.infs, row.smallest) == (5, 1, 0.25)


@pytest.mark.parametrize("every", [0, -1, 2.0, True])
def test_a_number_that_is_no_number_of_steps_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match=r"`every` must be a positive number of steps\. Received: every="):
        Schedule(every)


@pytest.mark.parametrize("pair", [(5, 5), (-1, 3), (3,)])
def test_a_pair_that_is_no_range_is_refused(pair: Any) -> None:
    with pytest.raises(ValueError, match=r"`steps` must be pairs of a first step"):
        Schedule(1, [pair])


def test_no_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`formats` must name at least one format. Received: \(\)"):
        WatchRecord(1, None, ())


def test_ranges_may_come_from_a_generator() -> None:
    schedule: Any = Schedule(1, ((first, first + 1) for first in (2, 5)))  # type: ignore[arg-type]
    assert [step for step in range(8) if schedule.samples(step)] == [2, 5]


@pytest.mark.parametrize(
    ("scale", "flushed", "overflow"), [(0.0, 1.0, 0.0), (2.0**-140, 1.0, 0.0), (math.inf, 0.0, 1.0)]
)
def test_a_scale_that_has_left_its_range_has_losses_too(scale: float, flushed: float, overflow: float) -> None:
    (row,) = record_of(("w", np.array([3.0, 0.25], np.float32), scale)).rows()
    assert (row.scale, row.formats["FP16"].flushed, row.formats["FP16"].overflow) == (scale, flushed, overflow)
