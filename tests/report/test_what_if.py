"""What other policies would have done in a recorded run, and where the record does not say."""

from pathlib import Path

import numpy as np
import pytest
from tests.recording.made import header, peaks, record, trained

from gradscale import Dynamic, Headroom, Policy, Static, Status, preset
from gradscale.histogram import exponent_histogram, lost_share
from gradscale.recording.form import Step, Watched
from gradscale.recording.reader import read_run
from gradscale.report.what_if import own_policies, predict

RUNS = Path(__file__).parents[1] / "data" / "runs"

POLICIES = [
    Dynamic(init_scale=2.0**24, growth_interval=20),
    Headroom(),
    Static(2.0**20),
    preset("deepspeed"),
    preset("torch", growth_interval=10),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_policy_that_made_a_record_gives_its_scales_and_skips_exactly(tmp_path: Path, policy: Policy) -> None:
    run = read_run(trained(tmp_path, policy, peaks(500), bad_losses=(100, 101, 300)))
    [found] = predict(run, [policy])
    assert run.skipped.sum() > 2
    np.testing.assert_array_equal(found.scales, run.scale)
    np.testing.assert_array_equal(found.skipped, run.skipped)
    assert not found.undecided.any()


@pytest.mark.parametrize("name", ["healthy", "nan_batch", "learning_rate"])
def test_that_holds_for_runs_of_torch(name: str) -> None:
    run = read_run(RUNS / f"{name}.jsonl")
    [found] = predict(run, [own_policies(run)[0].policy])
    np.testing.assert_array_equal(found.scales, run.scale)
    np.testing.assert_array_equal(found.skipped, run.skipped)


def test_a_resumed_part_begins_with_the_state_in_its_header(tmp_path: Path) -> None:
    policy = Dynamic(init_scale=1024.0, growth_interval=100)
    path = record(tmp_path, Step(step=0, scale=1024.0, status=Status.APPLIED), policy=policy)
    other = Dynamic(init_scale=4096.0, growth_interval=100)
    part = header(policy, other.start(), resumed=True).line()
    path.write_text(path.read_text() + part + Step(step=1, scale=4096.0, status=Status.APPLIED).line())
    [found] = predict(read_run(path), [policy])
    assert found.scales.tolist() == [1024.0, 4096.0]


def test_where_amax_is_known_every_clean_step_is_decided_as_training_would_have(tmp_path: Path) -> None:
    amax = peaks(300)
    low = read_run(trained(tmp_path, Static(16.0), amax))
    assert not low.skipped.any()
    for policy in POLICIES:
        [predicted] = predict(low, [policy])
        run = read_run(trained(tmp_path, policy, amax))
        np.testing.assert_array_equal(predicted.scales, run.scale)
        np.testing.assert_array_equal(predicted.skipped, run.skipped)
        assert not predicted.undecided.any()


def test_a_step_that_overflowed_is_undecided_below_its_scale_and_decided_above(tmp_path: Path) -> None:
    run = read_run(record(tmp_path, Step(step=0, scale=1024.0, status=Status.OVERFLOW)))
    at, above, below = predict(run, [Static(1024.0), Static(2048.0), Static(512.0)])
    assert [each.skipped.tolist() for each in (at, above, below)] == [[True], [True], [False]]
    assert [each.undecided.tolist() for each in (at, above, below)] == [[False], [False], [True]]


def test_a_clean_step_of_unknown_size_is_undecided_above_its_scale(tmp_path: Path) -> None:
    run = read_run(record(tmp_path, Step(step=0, scale=1024.0, status=Status.APPLIED)))
    at, above = predict(run, [Static(1024.0), Static(2048.0)])
    assert (at.skipped[0], at.undecided[0], above.skipped[0], above.undecided[0]) == (False, False, True, True)


def test_a_loss_that_is_not_finite_is_skipped_at_any_scale(tmp_path: Path) -> None:
    run = read_run(record(tmp_path, Step(step=0, scale=1024.0, status=Status.NONFINITE_LOSS)))
    [found] = predict(run, [Static(2.0**-20)])
    assert (found.skipped[0], found.undecided[0]) == (True, False)


def test_a_step_without_gradients_is_none_of_a_policy(tmp_path: Path) -> None:
    run = read_run(record(tmp_path, Step(step=0, scale=1024.0, status=Status.NO_GRADS)))
    [found] = predict(run, [Dynamic(growth_interval=1)])
    assert (found.skipped[0], found.undecided[0], found.stuck) == (False, False, False)


def test_bits_are_counted_below_the_highest_power_of_two_that_fits(tmp_path: Path) -> None:
    run = read_run(record(tmp_path, Step(step=0, scale=1.0, status=Status.APPLIED, amax=1.0)))
    fits, higher = predict(run, [Static(2.0**10), Static(2.0**15)])
    assert (fits.bits_below, higher.bits_below) == (5.0, 0.0)


def test_the_share_lost_is_that_of_the_histograms_at_the_policys_scale(tmp_path: Path) -> None:
    histogram = exponent_histogram(np.float32(2.0) ** -np.arange(20, 40, dtype=np.float32))
    tally = Watched("layer.weight", "weight_grad", histogram, 1.0, "float32", 1024.0)
    ignored = tally._replace(kind="weight")
    step = Step(step=0, scale=1024.0, status=Status.APPLIED, amax=2.0**-20, watch=(tally, ignored))
    run = read_run(record(tmp_path, step))
    for scale in (1.0, 2.0**4, 2.0**12):
        assert predict(run, [Static(scale)])[0].share_lost == lost_share(histogram, "FP16", scale)


def test_a_policy_that_reads_what_was_not_recorded_is_refused(tmp_path: Path) -> None:
    run = read_run(record(tmp_path, Step(step=0, scale=1024.0, status=Status.APPLIED)))
    with pytest.raises(ValueError, match=r"Headroom reads `amax`, which .*run\.jsonl does not have"):
        predict(run, [Headroom()])


def test_the_norm_takes_the_place_of_amax_which_it_bounds(tmp_path: Path) -> None:
    run = read_run(record(tmp_path, *(Step(step=n, scale=16.0, status=Status.APPLIED, norm=2.0**-4) for n in range(3))))
    [found] = predict(run, [Headroom()])
    assert found.scales.tolist() == [16.0, 2.0**13, 2.0**17]
    assert found.undecided.tolist() == [False, False, False]
