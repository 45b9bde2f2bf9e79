"""`benchmarks/study`: its rows can be continued, and its figures are what they are called."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.study.gradients import Gradients, best_scale, exact_gradients
from benchmarks.study.plan import cases
from benchmarks.study.report import claims, tables
from benchmarks.study.results import Results
from benchmarks.study.rules import RULES
from benchmarks.study.tasks import TASKS
from benchmarks.study.training import Case, run
from torch import nn

from gradscale import FP16


def row(rule: str, **figures: Any) -> dict[str, Any]:
    case = {"task": "GAN", "rule": rule, "format": "fp16", "clips": False, "seed": 0, "steps": 10}
    measured = {"skipped": 0, "applied": 10, "steps_to_best": 1, "lost": 0.0, "final": 1.0}
    return case | measured | figures


def test_the_full_form_has_every_rule_and_task_and_no_case_twice() -> None:
    planned = list(cases(quick=False))
    assert len({case.key for case in planned}) == len(planned)
    assert {case.task for case in planned} == set(TASKS)
    assert {case.rule for case in planned} == set(RULES)
    assert {case.seed for case in planned} == {0, 1, 2}


def test_rows_that_were_written_are_there_when_the_study_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = Results(path)
    first.start({"command": "study"})
    first.add("one", row("auto"))
    again = Results(path)
    again.start({"command": "study"})
    assert again.rows == {"one": row("auto") | {"made_by": 0}}
    assert again.made_by == [{"command": "study"}]


def test_the_claims_compare_auto_with_torch_row_by_row() -> None:
    rows = {"a": row("auto", skipped=1, lost=1e-7), "b": row("torch", skipped=10, lost=1e-6, steps_to_best=None)}
    found = claims(rows)
    assert "1 against 10: 10.0%" in found
    assert "| 0 of 1 |" in found
    assert "1 of 1 (torch: 0)" in found
    assert "at most 10.00%, in 1 runs" in found
    rows["b"]["skipped"] = 0
    assert "1 of 1: GAN (fp16, seed 0)" in claims(rows)


def test_a_rule_that_was_not_run_is_shown_as_not_run() -> None:
    rows = {"a": row("auto"), "b": row("torch"), "c": row("LogMax") | {"task": "char-GPT"}}
    assert "| GAN | 0 | 10 | 0 / 1 / 0e+00 / 1.000 | 0 / 1 / 0e+00 / 1.000 | not run |" in tables(rows)


def test_the_table_shows_the_seeds_that_both_rules_were_run_with_and_no_other() -> None:
    rows = {"a": row("auto"), "b": row("torch"), "c": row("torch") | {"seed": 1, "final": 9.0}}
    assert "| GAN | 0 | 10 | 0 / 1 / 0e+00 / 1.000 | 0 / 1 / 0e+00 / 1.000 |" in tables(rows)


def test_the_gradients_of_outputs_weights_and_biases_are_found_and_nothing_is_changed() -> None:
    linear = nn.Linear(2, 1)
    model = nn.Sequential(linear, nn.BatchNorm1d(1))
    with torch.no_grad():
        linear.weight.fill_(1.0)
    inputs = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    found = exact_gradients(model, lambda: linear(inputs).sum())
    assert [tensor.tolist() for tensor in found.tensors] == [[[1.0], [1.0]], [[4.0, 7.0]]]
    assert [tensor.tolist() for tensor in found.biases] == [[2.0]]
    assert found.amax == 7
    assert model[0].weight.grad is None


def test_lost_energy_is_that_of_elements_that_become_zero() -> None:
    gradients = Gradients([torch.tensor([3.0, 4.0, 2.0**-30])], [])
    assert gradients.lost(FP16, 1.0) == pytest.approx(2.0**-60 / 25)
    assert gradients.lost(FP16, 2.0**10) == 0
    assert best_scale(4.0, FP16) == 2.0**13


def test_a_run_measures_what_the_policy_did() -> None:
    found = run(Case("fine-tuning, 3 steps", "torch", "fp16", False, 0, 3))
    assert (found["skipped"], found["applied"]) == (3, 0)
    found = run(Case("fine-tuning, 3 steps", "auto", "fp16", False, 0, 3))
    assert (found["skipped"], found["applied"]) == (0, 3)
    assert found["steps_to_best"] <= 3
    assert math.isfinite(found["final"])
