"""The health of a run, from numbers alone."""

import logging
import math
from dataclasses import replace

import pytest

from gradscale.engine.culprits import Culprit
from gradscale.engine.health import Condition, Health, HealthLog, Vitals, Weights, health_of
from gradscale.engine.result import Status

GOOD = Vitals(
    scale=65536.0,
    applied=1000,
    skipped=1,
    recent=(1000, 1),
    status=Status.APPLIED,
    headroom_bits=4.0,
    parameters=8,
    weights=Weights(0.7, "head.weight", 0.5),
)
OVERFLOWED = replace(GOOD, status=Status.OVERFLOW, consecutive_skips=1)

CASES = {
    "a run that applies its steps": (GOOD, Condition.OK),
    "a run before its first step": (Vitals(65536.0, 0, 0), Condition.OK),
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
    "two of few recent steps skipped": (replace(GOOD, recent=(8, 2)), Condition.OK),
    "overflows at the floor": (replace(OVERFLOWED, stuck=True, consecutive_skips=9, scale=1.0), Condition.STUCK),
    "no step with a gradient": (
        replace(GOOD, status=Status.NO_GRADS, applied=0, skipped=0, recent=(0, 0)),
        Condition.STUCK,
    ),
    "one step without a gradient": (replace(GOOD, status=Status.NO_GRADS), Condition.OK),
    "small gradients": (replace(GOOD, headroom_bits=20.0), Condition.UNDERFLOWING),
    "gradients of zero": (replace(GOOD, headroom_bits=math.inf), Condition.UNDERFLOWING),
    "gradients of unknown size": (replace(GOOD, headroom_bits=math.nan), Condition.OK),
    "BF16": (replace(GOOD, in_bf16=True), Condition.UNNEEDED),
    "a loss that is NaN": (replace(OVERFLOWED, status=Status.NONFINITE_LOSS), Condition.FORWARD_OVERFLOW),
    "weights that have grown": (replace(GOOD, weights=Weights(1e4, "a", 0.5)), Condition.BROKEN),
    "weights that are NaN before a step": (
        replace(GOOD, applied=0, weights=Weights(math.nan, "a", math.nan)),
        Condition.BROKEN,
    ),
    "large weights before a step": (
        replace(GOOD, applied=0, skipped=0, weights=Weights(1e4, "a", 0.5)),
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


def test_a_stuck_run_has_the_cause_that_the_stuck_check_reports() -> None:
    seen = replace(CASES["overflows at the floor"][0], culprits=[Culprit("head.weight", "inf")])
    assert "one parameter, 'head.weight', overflows at any scale" in health_of(seen).advice


def test_diverged_weights_are_reported_with_the_learning_rate() -> None:
    advice = health_of(replace(GOOD, weights=Weights(1e4, "a", 0.5, learning_rate=3.0))).advice
    assert "the learning rate (3) is too high" in advice


def test_parameters_without_a_gradient_are_named() -> None:
    health = health_of(replace(GOOD, without_gradients=["body.weight", "body.bias"]))
    assert health.condition is Condition.OK
    assert "2 parameters had no gradient" in health.advice
    assert "body.weight, body.bias" in health.advice


def test_updates_are_counted_against_steps() -> None:
    health = health_of(GOOD)
    assert (health.applied, health.steps) == (1000, 1001)
    assert str(health) == "ok: 1000 updates in 1001 steps. Nothing to do."


def test_the_evidence_has_what_is_known() -> None:
    evidence = health_of(replace(GOOD, headroom_bits=math.nan)).evidence
    assert "headroom_bits" not in evidence
    assert (evidence["recent_skipped"], evidence["largest_weight"], evidence["status"]) == (1, 0.7, "applied")


def test_a_condition_is_logged_when_it_changes_and_not_again(caplog: pytest.LogCaptureFixture) -> None:
    log = HealthLog()
    stuck = Health(Condition.STUCK, "Do it.", 1, 9)
    with caplog.at_level(logging.INFO):
        for health in (Health(Condition.OK, "", 1, 1), stuck, stuck, Health(Condition.OK, "Fine.", 9, 20)):
            log.note(health)
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("WARNING", "stuck: 1 updates in 9 steps. Do it."),
        ("INFO", "ok: 9 updates in 20 steps. Fine."),
    ]


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
