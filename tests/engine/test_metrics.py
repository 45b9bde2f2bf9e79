"""The metrics of every adapter: the same names, NaN where a number is not known."""

import math
from dataclasses import replace

import numpy as np

from gradscale import Dynamic
from gradscale.engine.metrics import METRICS, metrics_of

STATE = replace(Dynamic(init_scale=64.0).start(), applied=np.int32(6), skipped=np.int32(2))


def test_all_names_are_there_and_what_is_not_known_is_nan() -> None:
    found = metrics_of(STATE, None, None, np)
    assert tuple(found) == METRICS
    assert (found["scale"], found["applied"], found["skipped"], found["skip_rate"]) == (64, 6, 2, 0.25)
    assert math.isnan(found["grad_norm"])
    assert math.isnan(found["headroom_bits"])


def test_headroom_is_how_often_the_scale_can_double() -> None:
    found = metrics_of(STATE, np.float32(3), np.float32(65504 / 64 / 4), np)
    assert found["grad_norm"] == 3
    assert abs(found["headroom_bits"] - 2) < 1e-5


def test_an_overflow_leaves_the_headroom_unknown() -> None:
    assert math.isnan(metrics_of(STATE, None, np.float32(np.inf), np)["headroom_bits"])


def test_a_run_without_steps_has_skipped_none() -> None:
    assert metrics_of(Dynamic().start(), None, None, np)["skip_rate"] == 0
