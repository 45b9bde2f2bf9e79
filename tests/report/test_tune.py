"""The settings that would have served recorded runs best."""

from pathlib import Path

import numpy as np
import pytest
from tests.recording.made import peaks, record, trained

from gradscale import Dynamic, Headroom, Static, Status
from gradscale.histogram import exponent_histogram
from gradscale.recording.form import Step, Watched
from gradscale.recording.reader import Run, read_run
from gradscale.report.tune import Candidate, front, tune
from gradscale.report.what_if import predict


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read_run(trained(tmp_path_factory.mktemp("run"), Static(16.0), peaks(200)))


def test_each_candidate_has_the_skips_and_bits_of_a_prediction(run: Run) -> None:
    tried = tune([run], 60)
    assert {type(each.policy) for each in tried} == {Dynamic, Headroom, Static}
    for candidate, found in zip(tried, predict(run, [each.policy for each in tried]), strict=True):
        assert candidate.skipped == found.skipped.mean()
        assert candidate.bits_below == pytest.approx(found.bits_below)


def test_the_best_comes_first_and_refining_does_not_make_it_worse(run: Run) -> None:
    tried = tune([run], 300)
    assert len({each.policy for each in tried}) == len(tried) == 300
    costs = [each.cost for each in tried]
    assert costs == sorted(costs)
    assert costs[0] <= tune([run], 100)[0].cost


def test_lost_elements_count_where_histograms_were_recorded(tmp_path: Path) -> None:
    small = exponent_histogram(np.array([2.0**-30, 2.0**-10], np.float32))
    tally = Watched("layer.weight", "weight_grad", small, 2.0**-10, "float32", 16.0)
    step = Step(step=0, scale=16.0, status=Status.APPLIED, amax=2.0**-10, watch=(tally,))
    static = [each for each in tune([read_run(record(tmp_path, step))], 200) if isinstance(each.policy, Static)]
    lost = {each.policy.scale: (each.skipped, each.lost) for each in static}
    assert {lost[scale] for scale in lost if scale < 2.0**5} == {(0.0, 0.5)}
    assert {lost[scale] for scale in lost if 2.0**6 <= scale <= 2.0**25} == {(0.0, 0.0)}
    assert {lost[scale][0] for scale in lost if scale >= 2.0**26} == {1.0}


def test_several_runs_count_together(run: Run, tmp_path: Path) -> None:
    other = read_run(trained(tmp_path, Static(16.0), [4 * peak for peak in peaks(200)]))
    for each in tune([run, other], 30):
        both = [predict(one, [each.policy])[0].skipped for one in (run, other)]
        assert each.skipped == np.concatenate(both).mean()


def test_without_sizes_no_policy_that_reads_them_is_tried(tmp_path: Path) -> None:
    run = read_run(record(tmp_path, Step(step=0, scale=16.0, status=Status.APPLIED)))
    assert not any(isinstance(each.policy, Headroom) for each in tune([run], 30))


def test_the_front_has_what_no_other_beats_in_both() -> None:
    def made(skipped: float, lost: float) -> Candidate:
        return Candidate(Static(1.0), skipped, lost, 0.0)

    best, cheap, beaten, dear = made(0.0, 0.5), made(0.1, 0.2), made(0.1, 0.3), made(0.2, 0.1)
    assert front([dear, beaten, cheap, best]) == [best, cheap, dear]


def test_runs_without_scales_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`tune` needs runs that have steps and scales. Received: \[\]"):
        tune([])
