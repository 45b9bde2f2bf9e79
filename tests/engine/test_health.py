"""The health of a run, from numbers alone."""

import logging
import math
from dataclasses import replace

import pytest

from gradscale.engine.culprits import Culprit
from gradscale.engine.health import Condition, Evidence, Health, HealthLog, Losses, Weights, diagnosis, health_of
from gradscale.engine.result import Status

GOOD = Evidence(
    scale=65536.0,
    applied=1000,
    skipped=1,
    recent=(1000, 1),
    rows=1,
    status=Status.APPLIED,
    headroom_bits=4.0,
    parameters=8,
    weights=Weights(0.7, "head.weight", 0.5, growth=1.4),
    first_losses=Losses([2.0, 3.0], 16.0),
    losses=Losses([1.0], 65536.0),
    policy="Dynamic",
)
OVERFLOWED = replace(GOOD, status=Status.OVERFLOW, consecutive_skips=1)
GROWN = Weights(4.0, "a", 0.5, growth=5.0)

CASES = {
    "a run that applies its steps": (GOOD, Condition.OK),
    "a run before its first step": (Evidence(65536.0, 0, 0), Condition.OK),
    "one skip among many steps": (OVERFLOWED, Condition.OK),
    "a policy that does not scale": (replace(GOOD, scaling=False, in_bf16=True), Condition.OK),
    "BF16 that is only checked": (replace(GOOD, multiplies=False, in_bf16=True), Condition.OK),
    "small gradients that are only checked": (replace(GOOD, multiplies=False, headroom_bits=20.0), Condition.OK),
    "an early skip of a run that is only checked": (
        replace(GOOD, multiplies=False, applied=5, recent=(5, 1)),
        Condition.OK,
    ),
    "the first steps": (replace(OVERFLOWED, applied=0, skipped=3, recent=(0, 3)), Condition.CALIBRATING),
    "a few skips in a row later": (replace(OVERFLOWED, consecutive_skips=3), Condition.CALIBRATING),
    "a tenth of the steps skipped": (replace(GOOD, recent=(90, 10)), Condition.THRASHING),
    "skips apart from each other at the start": (
        replace(GOOD, applied=15, skipped=5, recent=(15, 5), rows=5),
        Condition.THRASHING,
    ),
    "two of few recent steps skipped": (replace(GOOD, recent=(8, 2)), Condition.OK),
    "overflows at the floor": (replace(OVERFLOWED, stuck=True, consecutive_skips=9, scale=1.0), Condition.STUCK),
    "no step with a gradient": (
        replace(GOOD, status=Status.NO_GRADS, applied=0, skipped=0, recent=(0, 0)),
        Condition.STUCK,
    ),
    "one step without a gradient": (replace(GOOD, status=Status.NO_GRADS), Condition.OK),
    "small gradients": (replace(GOOD, headroom_bits=20.0), Condition.UNDERFLOWING),
    "gradients of zero": (replace(GOOD, headroom_bits=math.inf), Condition.UNDERFLOWING),
    "gradients of zero at a huge scale": (
        replace(GOOD, headroom_bits=math.inf, scale=2.0**48),
        Condition.ZERO_GRADIENTS,
    ),
    "gradients of zero in float32": (
        replace(GOOD, headroom_bits=math.inf, zero_in_float32=True),
        Condition.ZERO_GRADIENTS,
    ),
    "gradients of zero at a huge scale alone": (
        replace(GOOD, headroom_bits=math.inf, scale=2.0**48, zero_in_float32=False),
        Condition.UNDERFLOWING,
    ),
    "a part of a gradient that is zero at the scale": (replace(GOOD, lost={"a": 0.13}), Condition.UNDERFLOWING),
    "gradients of unknown size": (replace(GOOD, headroom_bits=math.nan), Condition.OK),
    "BF16": (replace(GOOD, in_bf16=True), Condition.UNNEEDED),
    "a loss that is NaN": (replace(OVERFLOWED, status=Status.NONFINITE_LOSS), Condition.NONFINITE_LOSS),
    "losses that were NaN again and again": (replace(GOOD, recent=(18, 2), bad_losses=2), Condition.NONFINITE_LOSS),
    "a loss that was NaN once": (replace(GOOD, applied=5, recent=(5, 1), bad_losses=1), Condition.OK),
    "a loss that was scaled twice": (
        replace(GOOD, losses=Losses([3.0 * 65536, 3.0], 65536.0)),
        Condition.SCALED_TWICE,
    ),
    "losses of zero": (replace(GOOD, losses=Losses([0.0, 0.0], 65536.0)), Condition.OK),
    "weights and loss that have grown": (
        replace(GOOD, weights=GROWN, losses=Losses([4.0], 65536.0)),
        Condition.DIVERGING,
    ),
    "weights and loss that have grown in many updates": (
        replace(GOOD, applied=5000, weights=GROWN, losses=Losses([4.0], 65536.0)),
        Condition.OK,
    ),
    "weights that have grown while the loss fell": (replace(GOOD, weights=GROWN), Condition.OK),
    "a loss that has grown": (replace(GOOD, losses=Losses([9.0], 65536.0)), Condition.OK),
    "weights that someone has written to": (replace(GOOD, written=7), Condition.OK),  # as a clip of weights does
    "weights that someone has written to and that have grown": (
        replace(GOOD, written=7, weights=GROWN),
        Condition.DIVERGING,
    ),
    "weights farther than updates reach now": (
        replace(GOOD, weights=Weights(5.0, "a", 0.5, 1e-4, reach=1e-3)),  # as the learning rate may have fallen
        Condition.OK,
    ),
    "weights that have grown far": (replace(GOOD, weights=Weights(1e4, "a", 0.5)), Condition.BROKEN),
    "weights that are NaN before a step": (
        replace(GOOD, applied=0, weights=Weights(math.nan, "a", math.nan)),
        Condition.BROKEN,
    ),
    "optimizer state that is not finite": (
        replace(GOOD, weights=Weights(0.7, "a", 0.5, bad_state=["exp_avg of a"])),
        Condition.BROKEN,
    ),
    "large weights before a step": (
        replace(GOOD, applied=0, skipped=0, recent=(0, 0), weights=Weights(1e4, "a", 0.5)),
        Condition.OK,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_condition_of(case: str) -> None:
    seen, condition = CASES[case]
    assert health_of(seen).condition is condition


def test_every_condition_has_a_case_and_advice() -> None:
    assert {condition for _, condition in CASES.values()} == set(Condition)
    assert all(health_of(seen).advice.endswith(".") for seen, _ in CASES.values())


def test_what_is_known_comes_before_what_is_likely_and_what_to_do() -> None:
    for seen, _ in CASES.values():
        known, _, rest = health_of(seen).advice.partition(" Likely cause: ")
        assert known.endswith(".")
        assert "Likely cause" not in rest


def test_no_cause_is_suspected_where_only_the_loss_is_known() -> None:
    found = diagnosis(Evidence(1024.0, 9, 3, 3, status=Status.NONFINITE_LOSS))
    assert (found.condition, found.known, found.suspected) == (Condition.NONFINITE_LOSS, "", "")
    assert found.do.startswith("No scale, retry or policy can help")


@pytest.mark.parametrize("case", ["a tenth of the steps skipped", "small gradients"])
def test_the_policy_in_use_is_not_advised(case: str) -> None:
    seen = CASES[case][0]
    assert "`Headroom()`" in health_of(seen).advice
    assert "`Headroom()`" not in health_of(replace(seen, policy="Headroom")).advice


def test_a_rank_says_whether_its_own_loss_was_finite() -> None:
    seen = CASES["a loss that is NaN"][0]
    assert "On this rank, 1 of 2, it is not finite." in health_of(replace(seen, rank=(1, 2, False))).advice
    assert "On this rank, 0 of 2, it is finite, and it is not on another." in str(
        health_of(replace(seen, rank=(0, 2, True)))
    )


def test_a_weight_beyond_fp16_is_named_where_the_loss_is_not_finite() -> None:
    seen = replace(CASES["a loss that is NaN"][0], weights=Weights(1e6, "embed.weight", 1e6))
    assert "A weight of embed.weight is 1e+06, and FP16 ends at 65504." in health_of(seen).advice


def test_a_probe_takes_the_place_of_what_is_likely() -> None:
    seen = replace(CASES["overflows at the floor"][0], culprits=[Culprit(name, "inf") for name in "ab"])
    assert "Likely cause: part of the model overflows" in health_of(seen).advice
    advice = health_of(replace(seen, probed="A probe found undefined: `div`.")).advice
    assert advice == "2 of 8 gradients overflow. A probe found undefined: `div`."


def test_a_stuck_run_has_the_parameter() -> None:
    seen = replace(CASES["overflows at the floor"][0], culprits=[Culprit("head.weight", "inf")])
    assert "The gradient of one parameter, 'head.weight', overflows." in health_of(seen).advice


def test_diverged_weights_are_reported_with_the_learning_rate() -> None:
    advice = health_of(replace(GOOD, weights=Weights(1e4, "a", 0.5, learning_rate=3.0, reach=30.0))).advice
    assert advice.startswith("The largest weight, in a, is 1e+04 after 1000 updates, and was 0.5 before the first")
    assert "Likely cause: the learning rate (3) is too high. " in advice


def test_parameters_without_a_gradient_are_named() -> None:
    health = health_of(replace(GOOD, without_gradients=["body.weight", "body.bias"]))
    assert health.condition is Condition.OK
    assert "2 parameters had no gradient" in health.advice
    assert "body.weight, body.bias" in health.advice


def test_updates_are_counted_against_steps() -> None:
    health = health_of(GOOD)
    assert (health.applied, health.steps) == (1000, 1001)
    assert str(health) == "ok: 1000 updates in 1001 steps. Nothing to do."
    assert str(replace(health, applied=1, steps=1)) == "ok: 1 update in 1 step. Nothing to do."


def test_the_evidence_has_what_is_known() -> None:
    evidence = health_of(replace(GOOD, headroom_bits=math.nan)).evidence
    assert "headroom_bits" not in evidence
    assert (evidence["recent_skipped"], evidence["largest_weight"], evidence["status"]) == (1, 0.7, "applied")
    assert (evidence["first_loss"], evidence["last_finite_loss"], evidence["weights_growth"]) == (2.5, 1.0, 1.4)


def test_a_condition_is_logged_when_it_changes_and_not_again(caplog: pytest.LogCaptureFixture) -> None:
    log = HealthLog()
    stuck = Health(Condition.STUCK, "Do it.", 1, 9)
    with caplog.at_level(logging.INFO):
        for health in (Health(Condition.OK, "", 1, 1), stuck, stuck, Health(Condition.OK, "Fine.", 9, 20)):
            log.note(health)
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("WARNING", "stuck: 1 update in 9 steps. Do it."),
        ("INFO", "ok: 9 updates in 20 steps. Fine."),
    ]


def test_without_logging_set_up_nothing_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    HealthLog().note(Health(Condition.STUCK, "Do it.", 1, 9))
    assert capsys.readouterr() == ("", "")


def test_a_condition_that_lasts_is_logged_again_after_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = HealthLog()
    log.note(Health(Condition.STUCK, "", 1, 9))
    monkeypatch.setattr("gradscale.engine.health.EVERY_S", 0.0)
    log.note(Health(Condition.STUCK, "", 1, 9))
    log.note(Health(Condition.OK, "", 1, 9))
    log.note(Health(Condition.OK, "", 1, 9))
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 2
