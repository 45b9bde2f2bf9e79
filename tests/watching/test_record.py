"""What every adapter's `watch` shares: the steps that are sampled, and the rows of what was counted."""

import math
from typing import Any

import numpy as np
import pytest

from gradscale.histogram import exponent_histogram
from gradscale.watching.counted import Counted, counted_of
from gradscale.watching.record import WatchRecord
from gradscale.watching.sample import Sample
from gradscale.watching.schedule import Schedule


def counted(*arrays: Any, scales: tuple[float, ...], shifts: tuple[int, ...]) -> Counted:
    histograms = [exponent_histogram(array) for array in arrays]
    return counted_of(
        np.stack([each.counts for each in histograms]),
        np.stack([(each.zeros, each.infs, each.nans) for each in histograms]),
        np.array([np.abs(array).max() for array in arrays]),
        [array.dtype for array in arrays],
        scales,
        shifts,
    )


def record_of(**slots: list[int]) -> WatchRecord:
    found = counted(
        np.array([3.0, 0.25, 0.0], np.float32),
        np.array([1024.0, np.inf], np.float16),
        scales=(1.0, 1024.0),
        shifts=(0, -10),
    )
    record = WatchRecord(100, None, ["fp16"])
    record._samples[7] = Sample({(name, "weight"): each for name, each in slots.items()}, found)
    return record


def test_a_row_has_the_facts_of_one_tensor() -> None:
    (row,) = record_of(w=[0]).rows()
    assert (row.step, row.name, row.dtype, row.scale, row.elements) == (7, "w", "float32", 1.0, 3)
    assert (row.amax, row.smallest, row.range_bits, row.zeros, row.infs, row.nans) == (3.0, 0.25, 4, 1 / 3, 0, 0)


def test_a_shift_unscales_the_numbers_of_a_row() -> None:
    (row,) = record_of(w=[1]).rows()
    assert (row.scale, row.smallest, row.infs, row.amax) == (1024.0, 1.0, 1, math.inf)


def test_several_tensors_of_a_name_are_one_row() -> None:
    (row,) = record_of(w=[0, 1]).rows()
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
    found = counted(np.array([3.0, 0.25], np.float32), scales=(scale,), shifts=(0,))
    record = WatchRecord(100, None, ["fp16"])
    record._samples[0] = Sample({("w", "weight_grad"): [0]}, found)
    (row,) = record.rows()
    assert (row.scale, row.formats["FP16"].flushed, row.formats["FP16"].overflow) == (scale, flushed, overflow)
