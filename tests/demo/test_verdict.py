"""The verdict: its figures and its words follow from the runs."""

from typing import Any

from examples.demo.runs import Comparison, Run, Subject
from examples.demo.show import verdict

SUBJECT = Subject("cnn", "Loss", {"accuracy": ".0%"}, "")


def run(name: str, accuracy: float, **fields: Any) -> Run:
    return Run(name, losses=[1.0] * 4, scales=[1.0] * 4, lost=[0.5, 0.7], scores={"accuracy": accuracy}, **fields)


def said(*runs: Run, full: float = 0.9, seeds: tuple[float, ...] = (0.91, 0.87), untrained: float = 0.1) -> str:
    others = {index + 1: {"accuracy": accuracy} for index, accuracy in enumerate(seeds)}
    return verdict(Comparison(SUBJECT, [run("FP32", full), *runs], {"accuracy": untrained}, others))


def test_a_run_that_ends_where_it_began_did_not_learn() -> None:
    assert "FP16 unscaled lost 60% of its gradients and did not learn." in said(run("FP16 unscaled", 0.12))


def test_a_run_that_learned_less_is_given_its_share_of_the_progress() -> None:
    assert "and made 50% of FP32's progress in accuracy." in said(run("FP16 unscaled", 0.5))


def test_scaled_runs_match_within_the_range_of_fp32s_seeds() -> None:
    text = said(run("FP16 Static", 0.87), run("FP16 Headroom", 0.93), run("FP16 Dynamic", 0.9))
    assert text == (
        "FP16 Static, FP16 Headroom and FP16 Dynamic match FP32 within seed noise "
        "(off by at most 3 points, where FP32's accuracy is 87% to 91% over 3 seeds)."
    )


def test_the_difference_of_two_scores_that_are_no_percentages_has_their_own_format() -> None:
    runs = [
        Run(name, lost=[0.0], scores={"perplexity": score}) for name, score in (("FP32", 11.6), ("FP16 Static", 11.8))
    ]
    seeds = {1: {"perplexity": 11.4}, 2: {"perplexity": 12.3}}
    text = verdict(Comparison(Subject("gpt", "Loss", {"perplexity": ".1f"}, ""), runs, {"perplexity": 99.0}, seeds))
    assert "(off by at most 0.2, where FP32's perplexity is 11.4 to 12.3 over 3 seeds)" in text


def test_a_run_further_off_than_the_seeds_does_not_match() -> None:
    text = said(run("FP16 Headroom", 0.8))
    assert "within seed noise" not in text
    assert "FP16 Headroom ends at 80%, further from FP32 than its seeds are from each other." in text


def test_a_lower_score_may_be_the_better_one() -> None:
    text = said(run("FP16 unscaled", 99.0), run("FP16 Headroom", 11.5), full=11.0, seeds=(12.0, 11.0), untrained=100.0)
    assert "did not learn. FP16 Headroom matches FP32" in text


def test_overflow_and_recovery_are_reported() -> None:
    skipping = Run(
        "FP16 Dynamic", [1.0] * 4, [2.0**32, 2.0**31, 2.0**30, 2.0**30], skipped=[0, 1], scores={"accuracy": 0.9}
    )
    assert said(skipping).endswith(
        "FP16 Dynamic skipped 2 steps that overflowed, at scales from 2^32 down to 2^31, and went on at lower ones."
    )


def test_a_single_overflow_is_reported_with_its_scale() -> None:
    skipping = Run("FP16 Dynamic", [1.0] * 4, [2.0**16] + [2.0**15] * 3, skipped=[0], scores={"accuracy": 0.9})
    assert said(skipping).endswith(
        "FP16 Dynamic skipped a step that overflowed, at a scale of 2^16, and went on at a lower one."
    )


def test_nothing_is_claimed_before_fp32_has_learned() -> None:
    assert said(run("FP16 unscaled", 0.1), full=0.12, seeds=(0.08, 0.1)) == (
        "Too few steps to tell: FP32's accuracy is 8% to 12% over 3 seeds, and 10% before training."
    )
