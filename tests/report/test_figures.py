"""The figures of a report: no spike is lost, names are escaped, numbers are those of the run."""

import json
from pathlib import Path

import numpy as np
from tests.recording.made import record

from gradscale import Status
from gradscale.engine.culprits import Culprit
from gradscale.histogram import exponent_histogram
from gradscale.recording.form import Step, Watched
from gradscale.recording.reader import Run, read_run
from gradscale.report.figures import BUCKETS, heat_map, lost_by_layer, thinned, timeline

HOSTILE = "<img onerror=alert(1) src=x>"


def sampled(tmp_path: Path) -> Run:
    histogram = exponent_histogram(np.array([2.0**-30, 2.0**-30, 2.0**-10, 2.0**-9], np.float32))
    tally = Watched(HOSTILE, "weight_grad", histogram, 2.0**-9, "float32", 16.0)
    steps = [
        Step(step=n, scale=16.0, status=Status.APPLIED, note={"loss": 1.0}, watch=(tally,) if n == 1 else ())
        for n in range(2)
    ]
    skip = Step(step=2, scale=16.0, status=Status.OVERFLOW, culprits=(Culprit(HOSTILE, "nan", 7),))
    return read_run(record(tmp_path, *steps, skip))


def test_a_line_of_many_steps_keeps_every_spike() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    spikes = {17: 90.0, 50_000: -80.0, 99_998: 70.0}
    values[list(spikes)] = list(spikes.values())
    rows = thinned(values)
    assert len(rows) <= 2 * BUCKETS + 2
    assert set(spikes) <= set(rows.tolist())
    assert (rows[0], rows[-1]) == (0, 99_999)
    assert np.all(np.diff(rows) > 0)


def test_a_short_line_keeps_every_step_and_its_gaps() -> None:
    assert thinned(np.array([1.0, np.nan, 2.0])).tolist() == [0, 1, 2]


def test_a_long_line_that_is_mostly_unknown_keeps_what_is_known() -> None:
    values = np.full(100_000, np.nan)
    values[[5, 70_000]] = 1.0
    assert thinned(values).tolist() == [5, 70_000]


def test_the_timeline_has_scale_loss_and_skips_with_their_parameters(tmp_path: Path) -> None:
    figure = timeline([sampled(tmp_path)])
    scale, skips, loss = figure["data"]
    assert (scale["x"], scale["y"]) == ([0, 1, 2], [16.0, 16.0, 16.0])
    assert (loss["y"], loss["yaxis"]) == ([1.0, 1.0, None], "y2")
    assert (skips["x"], skips["name"]) == ([2], "overflow (1)")
    assert skips["text"] == ["overflow<br>&lt;img onerror=alert(1) src=x&gt;: nan (7)"]
    json.dumps(figure, allow_nan=False)


def test_the_heat_map_has_the_exponents_times_the_scale(tmp_path: Path) -> None:
    figure = heat_map(sampled(tmp_path))
    assert figure is not None
    found = {x: z for x, z in zip(figure["x"], figure["z"][0][0], strict=True) if z is not None}
    assert found == {-26: np.log10(0.5), -6: np.log10(0.25), -5: np.log10(0.25)}
    assert (figure["steps"], figure["names"]) == ([1], [HOSTILE])
    assert [name for name, *_ in figure["ranges"]] == ["FP16", "FP8_E5M2", "FP8_E4M3", "BF16"]
    assert figure["ends"] == [-24.0, np.log2(65504)]


def test_lost_by_layer_has_the_share_that_became_zero(tmp_path: Path) -> None:
    figure = lost_by_layer(sampled(tmp_path))
    assert figure == {"x": [0.5], "names": [HOSTILE]}


def test_a_run_without_samples_has_neither(tmp_path: Path) -> None:
    run = read_run(record(tmp_path, Step(step=0, scale=16.0, status=Status.APPLIED)))
    assert (heat_map(run), lost_by_layer(run)) == (None, None)


def test_a_sample_of_which_every_gradient_is_inf_is_an_empty_heat_map(tmp_path: Path) -> None:
    tally = Watched(
        "layer.weight", "weight_grad", exponent_histogram(np.array([np.inf], np.float32)), 1.0, "float32", 1.0
    )
    run = read_run(record(tmp_path, Step(step=0, scale=2.0**32, status=Status.OVERFLOW, watch=(tally,))))
    figure = heat_map(run)
    assert figure is not None
    assert (figure["x"][0], figure["x"][-1]) == (-26, 17)
    assert {z for row in figure["z"][0] for z in row} == {None}
    assert lost_by_layer(run) is None
