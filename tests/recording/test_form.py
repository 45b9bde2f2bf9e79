"""The lines of a record: what is written is read back, and anything else is refused."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradscale import Dynamic, Headroom
from gradscale.engine.culprits import Culprit
from gradscale.engine.result import Status
from gradscale.histogram.counts import exponent_histogram
from gradscale.recording.form import Header, Step, Watched, read_line

HEADER = Header(
    gradscale="1.2.3",
    policy=Dynamic(init_scale=8.0).to_dict(),
    state=Dynamic(init_scale=8.0).start().to_dict(),
    amax_ratio=0.25,
    format="BF16",
    framework="torch",
    framework_version="2.13.0",
    started=1700000000.5,
    rank=1,
    ranks=4,
)

COUNTED = exponent_histogram(np.array([0.0, 1.0, 3.0, np.inf, np.nan, 2.0**-140], np.float32))

STEP = Step(
    step=12,
    scale=65536.0,
    status=Status.OVERFLOW,
    norm=math.inf,
    amax=float(np.float32(0.1)),
    share=0.5,
    retries=2,
    culprits=(Culprit("layer.weight", "inf", 3), Culprit("<img>", "nan")),
    note={"loss": math.nan, "lr": 0.001, "low": -math.inf},
    seconds=1.5,
)


def strict(line: str) -> dict[str, Any]:
    """Returns a line as JSON without literals that are none."""

    def refuse(literal: str) -> None:
        raise AssertionError(literal)

    assert line.endswith("\n")
    assert line.count("\n") == 1
    return json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize("header", [HEADER, replace(HEADER, resumed=True)])
def test_a_header_is_read_as_it_was_written(header: Header) -> None:
    line = header.line()
    assert strict(line)["schema"] == 1
    assert read_line(line) == header


@pytest.mark.parametrize("policy", [Headroom(), Dynamic(growth_interval=7, max_scale=2.0**20)])
def test_a_header_holds_the_policy_and_the_state(policy: Any) -> None:
    header = Header(gradscale="1", policy=policy.to_dict(), state=policy.start().to_dict(), amax_ratio=0.5)
    read = read_line(header.line())
    assert isinstance(read, Header)
    assert read.saved() == (policy, policy.start(), 0.5)


def test_a_step_is_read_as_it_was_written() -> None:
    read = read_line(STEP.line())
    assert isinstance(read, Step)
    assert math.isnan(read.note["loss"])
    assert replace(read, note={**read.note, "loss": 0.0}) == replace(STEP, note={**STEP.note, "loss": 0.0})


def test_a_step_holds_only_what_is_known() -> None:
    step = Step(step=0, scale=1.0, status=Status.APPLIED)
    assert strict(step.line()) == {"step": 0, "scale": 1.0, "status": "applied"}
    assert read_line(step.line()) == step


def test_numbers_that_are_not_finite_are_strings() -> None:
    values = strict(STEP.line())
    assert values["norm"] == "inf"
    assert values["note"] == {"loss": "nan", "lr": 0.001, "low": "-inf"}


def test_amax_is_the_same_float32_when_read() -> None:
    for amax in np.random.default_rng(0).integers(1, 0x7F800000, 1000, np.uint32).view(np.float32):
        read = read_line(replace(STEP, amax=float(amax)).line())
        assert isinstance(read, Step)
        assert np.float32(read.amax) == amax


def test_a_step_has_the_histograms_of_a_sample() -> None:
    tally = Watched("block.0.weight", "weight_grad", COUNTED, math.nan, "float16", 1024.0)
    read = read_line(replace(STEP, watch=[tally]).line())
    assert isinstance(read, Step)
    (found,) = read.watch
    assert (found.name, found.kind, found.dtype, found.scale) == (tally.name, tally.kind, "float16", 1024.0)
    assert math.isnan(found.amax)
    np.testing.assert_array_equal(found.histogram.host_counts, COUNTED.host_counts)
    assert (found.histogram.zeros, found.histogram.infs, found.histogram.nans) == (1, 1, 1)


def test_keys_of_later_versions_are_ignored() -> None:
    assert read_line(json.dumps({"step": 0, "scale": 1.0, "status": "applied", "new": 1})) == Step(
        step=0, scale=1.0, status=Status.APPLIED
    )


def test_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reads records of schema 1\. Received: schema=2, written by gradscale '9'"):
        read_line('{"gradscale": "9", "schema": 2}')


@pytest.mark.parametrize(
    "line",
    [
        *(
            "",
            "{",
            "[1]",
            "1",
            "null",
            '"gradscale"',
            "{}",
            '{"step": 1}',
            '{"gradscale": "1"}',
            b"\xff\xfe",
            "[" * 10**5,
        ),
        '{"gradscale": "1", "schema": 1}',
        '{"step": "x", "scale": 1, "status": "applied"}',
        '{"step": 1, "scale": 1, "status": "done"}',
        '{"step": 1, "scale": 1, "status": "applied", "culprits": [1]}',
    ],
)
def test_what_is_no_line_of_a_record_is_refused(line: Any) -> None:
    with pytest.raises(ValueError, match="A line of a record is"):
        read_line(line)
