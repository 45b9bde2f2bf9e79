"""`benchmarks/study`: its rows can be continued, and its figures are what they are called."""

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.study.commit import commit
from benchmarks.study.equations import Curve
from benchmarks.study.goals import Goal, goals
from benchmarks.study.gradients import Gradients, best_scale, exact_gradients
from benchmarks.study.language import LanguageTask, Trouble, warmed_up
from benchmarks.study.plan import cases, completed, source
from benchmarks.study.report import claims, coverage, section, tables
from benchmarks.study.results import Results
from benchmarks.study.rules import BASELINE, RULES
from benchmarks.study.task import Turn
from benchmarks.study.tasks import SETS, TASKS
from benchmarks.study.training import Case, Measures, Run, early_amax, run
from benchmarks.study.workers import run_all
from torch import nn

from gradscale import FP16, Dynamic, Seen


def row(rule: str, **figures: Any) -> dict[str, Any]:
    case = {"task": "GAN", "rule": rule, "format": "fp16", "clips": False, "seed": 0, "steps": 10}
    measured = {
        "skipped": 0,
        "applied": 10,
        "steps_to_best": 1,
        "lost": 0.0,
        "final": 1.0,
        "lowest_scale": 0.0,
    }
    return case | measured | figures


def goal(rows: dict[str, dict[str, Any]], text: str) -> Goal:
    (found,) = (each for each in goals(rows, held_out=1) if text in each.text)
    return found


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


def test_claims_come_first_and_then_the_other_rules_one_after_the_other() -> None:
    planned = [(case.rule, case.clips) for case in cases(quick=False)]
    first = dict.fromkeys(("claims" if rule in ("FP32", "torch", "auto") else rule, clips) for rule, clips in planned)
    others = ["DeepSpeed", "Megatron", "LogMax", "Histogram"]
    assert list(first) == [(rule, clips) for rule in ("claims", *others) for clips in (False, True)]


def test_held_out_tasks_are_run_with_the_rules_of_the_claims_and_in_fp16_first() -> None:
    for which, tasks in ((1, 14), (2, 12), (3, 12)):
        held_out = [case for case in cases(quick=False) if TASKS[case.task].held_out == which]
        assert {(case.rule, case.format) for case in held_out} == {
            ("FP32", "fp32"),
            *product(("torch", "auto"), ("fp16", "fp8_e5m2")),
        }
        assert list(dict.fromkeys(case.format for case in held_out)) == ["fp32", "fp16", "fp8_e5m2"]
        assert len(held_out) == tasks * 2 * 3 * 5
    others = [case for case in cases(quick=False) if not TASKS[case.task].held_out]
    assert {case.rule for case in others} == set(RULES)


def test_every_task_is_in_a_set_with_a_heading() -> None:
    assert {spec.held_out for spec in TASKS.values()} == set(range(len(SETS)))


def test_a_start_that_is_the_policys_own_is_not_run_again() -> None:
    start = Case("start at 2^32", "Megatron", "fp16", True, 1, 1500)
    usual = replace(start, task="char-GPT")
    assert source(start) == usual
    assert source(replace(start, rule="torch")) == replace(start, rule="torch")
    assert source(replace(start, rule="FP32", format="fp32")) == replace(usual, rule="FP32", format="fp32")
    assert source(usual) == usual
    ran = {usual.key: row("Megatron", skipped=7)}
    found = completed(ran, [start, usual, replace(usual, seed=2)])
    assert {key: (each["task"], each["skipped"]) for key, each in found.items()} == {
        start.key: ("start at 2^32", 7),
        usual.key: ("char-GPT", 7),
    }
    assert coverage(found, [start, usual, replace(usual, seed=2)]) == (
        "2 of 3 rows of the full form have been made, by 1 runs: 1 are the same run as another. "
        "Of `auto`, 0 are without clipping, and 0 with."
    )


def test_dynamic_has_the_rule_of_torch_above_its_lowest_scale_and_needs_no_rows_of_its_own() -> None:
    ours, theirs = Dynamic(), RULES[BASELINE].policy
    for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval"):
        assert getattr(ours, name) == getattr(theirs, name)
    ours, theirs = (replace(policy, growth_interval=3) for policy in (ours, theirs))
    state, other = ours.start(), theirs.start()
    scales = []
    for finite in [*(np.random.default_rng(0).random(300) < 0.9), *[False] * 46]:
        state = ours.next(state, Seen(finite=np.bool_(finite)), np)
        other = theirs.next(other, Seen(finite=np.bool_(finite)), np)
        assert state.scale == other.scale
        scales.append(state.scale)
    assert (min(scales), max(scales) > 2.0**40) == (1, True)


def test_runs_in_which_dynamic_would_differ_from_torch_are_counted() -> None:
    rows = {"a": row("auto"), "b": row("torch")}
    assert "torch's scale never fell below" in claims(rows, held_out=1)
    rows["b"]["lowest_scale"] = -1.0
    assert "torch's scale fell below in 1 of 1 runs" in claims(rows, held_out=1)


def test_each_goal_has_its_figure_and_whether_it_holds() -> None:
    rows = {
        "a": row("auto", skipped=1, lost=1e-7),
        "b": row("torch", skipped=10, lost=1e-6, steps_to_best=None),
        "c": row("FP32", format="fp32"),
    }
    assert all(each.holds is not False for each in goals(rows, held_out=0))
    assert [each.text[:11] for each in goals(rows, held_out=0) if each.holds is None] == ["bad batches"]
    assert (goal(rows, "skipped steps, in all").found, goal(rows, "skipped steps, in all").baseline) == (
        "1 (10.0%)",
        "10",
    )
    assert (goal(rows, "within 3 steps").found, goal(rows, "within 3 steps").baseline) == (
        "1 of 1",
        "0 of 1 within 3",
    )
    assert goal(rows, "energy lost than torch").found == "at most 10.00%, in 1 runs"
    assert goal(rows, "noise of FP32").found == "1 of 1"
    assert "What misses" not in claims(rows, held_out=1)


@pytest.mark.parametrize(
    ("text", "ours", "theirs"),
    [
        ("skipped steps, in all", {"skipped": 2}, {"skipped": 19}),
        ("within 3 steps", {"steps_to_best": 4}, {"steps_to_best": 4}),
        ("within 3 steps", {"steps_to_best": None}, {"steps_to_best": None}),
        ("energy lost than torch", {"lost": 2e-7}, {"lost": 1e-7}),
        ("noise of FP32", {"final": 1.03}, {"final": 1.03}),
        ("noise of FP32", {"final": math.inf}, {}),
        ("Dynamic`: skipped", {"skipped": 1}, {}),
        ("Dynamic`: steps to", {"steps_to_best": 2}, {}),
        ("Dynamic`: energy", {"lost": 2e-8}, {"lost": 9e-9}),
        ("Dynamic`: final loss", {"final": 1.01}, {"final": 0.98}),
    ],
)
def test_a_run_that_misses_a_goal_is_listed(text: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    rows = {"a": row("auto", **ours), "b": row("torch", **theirs), "c": row("FP32", format="fp32")}
    found = goal(rows, text)
    assert found.holds is False
    assert [miss.partition(":")[0].removesuffix(", seed 0") for miss in found.misses] == ["GAN, fp16"]
    assert f"    - {found.misses[0]}" in claims(rows, held_out=1)


def test_steps_that_fp32_skips_too_are_not_counted_against_a_rule() -> None:
    rows = {
        "a": row("auto", skipped=25),
        "b": row("torch", skipped=30),
        "c": row("FP32", skipped=25, format="fp32"),
    }
    found = goal(rows, "skipped steps, in all")
    assert (found.found, found.baseline, found.holds) == ("0 (0.0%)", "5", True)


def test_a_scale_that_is_good_late_but_before_that_of_torch_meets_its_goal() -> None:
    rows = {"a": row("auto", steps_to_best=9), "b": row("torch", steps_to_best=None)}
    assert goal(rows, "within 3 steps").holds


def test_sets_with_blocks_or_bad_batches_have_goals_of_their_own_for_them() -> None:
    blocks = {"task": "blocks of 50 steps"}
    rows = {"a": row("auto", **blocks, skipped=2), "b": row("torch", **blocks, skipped=1)}
    assert goal(rows, "blocks of tasks").misses == ["blocks of 50 steps, fp16, seed 0: 2 against 1"]
    bad = {"task": "bad batches: 2% infinite gradients"}
    rows = {
        "a": row("auto", **bad, final=1.01),
        "b": row("torch", **bad, final=0.98),
        "c": row("FP32", **bad, format="fp32"),
    }
    assert goal(rows, "bad batches: final").holds is False
    rows["a"]["final"] = 0.99
    assert goal(rows, "bad batches: final").holds
    shown = [[each.text.partition(" ")[0] for each in goals(rows, held_out)] for held_out in range(len(SETS))]
    assert ["blocks" in texts for texts in shown] == [False, True, True, True]
    assert ["bad" in texts for texts in shown] == [True, True, True, True]


def test_each_section_has_the_rows_of_its_tasks_alone() -> None:
    rows = {rule: row(rule) for rule in ("auto", "torch")}
    names = ("GAN", "VAE", "Q-learning", "DPO")
    rows |= {f"{rule}, {name}": row(rule, task=name) for rule in ("auto", "torch") for name in names[1:]}
    for held_out, (heading, own) in enumerate(zip(SETS.values(), names, strict=True)):
        text = section(rows, held_out)
        assert text.startswith(f"## {heading}\n")
        assert [f"| {name} |" in text for name in names] == [name == own for name in names]


def test_final_losses_are_within_noise_by_the_spread_of_the_seeds_in_fp32() -> None:
    single = {f"fp32 {seed}": row("FP32", format="fp32", seed=seed, final=1.0 + seed / 10) for seed in range(3)}
    ours = {f"auto {seed}": row("auto", seed=seed, final=1.25 + seed / 10) for seed in range(3)}
    assert goal(single | ours, "noise of FP32").holds  # a deviation is 0.1
    ours["auto 0"]["final"] += 0.3
    assert goal(single | ours, "noise of FP32").holds is False


def test_a_goal_that_nothing_was_run_for_is_not_said_to_hold() -> None:
    assert {each.holds for each in goals({}, held_out=1)} == {None}
    assert "| not run |" in claims({}, held_out=1)
    assert goal({"a": row("auto"), "b": row("torch")}, "noise of FP32").holds is None


def test_a_rule_that_was_not_run_is_shown_as_not_run() -> None:
    rows = {"a": row("auto"), "b": row("torch"), "c": row("LogMax") | {"task": "char-GPT"}}
    assert "| GAN | 0 | 10 | 0 / 1 / 0e+00 / 1.000 | 0 / 1 / 0e+00 / 1.000 | not run |" in tables(rows)


def test_the_table_shows_the_seeds_that_both_rules_were_run_with_and_no_other() -> None:
    rows = {"a": row("auto"), "b": row("torch"), "c": row("torch") | {"seed": 1, "final": 9.0}}
    assert "| GAN | 0 | 10 | 0 / 1 / 0e+00 / 1.000 | 0 / 1 / 0e+00 / 1.000 |" in tables(rows)


def test_there_is_no_table_before_both_rules_were_run() -> None:
    rows = {"a": row("torch"), "b": row("FP32", format="fp32")}
    assert tables(rows) == ""
    assert "### fp16, without clipping" in tables(rows | {"c": row("auto")})


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


def test_frozen_parameters_have_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1), nn.Linear(1, 1).requires_grad_(False))
    found = exact_gradients(model, lambda: model(torch.ones(1, 2)).sum())
    assert [tuple(tensor.shape) for tensor in found.tensors] == [(1, 1), (1, 1), (1, 2)]
    assert [tuple(tensor.shape) for tensor in found.biases] == [(1,)]


def test_a_loss_in_fp16_has_a_gradient_that_the_scale_must_leave_room_for() -> None:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
    inputs = torch.full((1, 1), 2.0**-10)
    in_fp16 = exact_gradients(model, lambda: (model(inputs) * 2.0**-5).mean())
    in_float32 = exact_gradients(model, lambda: model(inputs).float().mean() * 2.0**-5)
    assert [tensor.amax().item() for tensor in in_fp16.between] == [2.0**-5, 1.0, 1.0]
    assert (in_fp16.amax, in_float32.amax) == (1.0, 2.0**-5)
    assert [each.tolist() for each in in_fp16.tensors] == [each.tolist() for each in in_float32.tensors]


def test_logits_that_are_divided_in_fp16_have_larger_gradients_than_the_module() -> None:
    model = nn.Linear(1, 1)
    found = exact_gradients(model, lambda: (model(torch.zeros(1, 1)) / 8).float().sum())
    assert (found.tensors[0].item(), found.amax) == (0.125, 1.0)


def test_gradients_have_no_largest_if_one_is_nan() -> None:
    assert math.isnan(Gradients([torch.ones(2), torch.tensor([1.0, math.nan])], [torch.ones(1)]).amax)


def test_a_step_whose_gradients_are_all_zero_has_a_largest_of_zero_and_loses_nothing() -> None:
    measures = Measures()
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    found = exact_gradients(model, lambda: (model(torch.ones(1, 1)).float() * 0).sum())
    measures.note_gradients(found, FP16, 1.0, counts=True)
    assert (found.amax, measures.amax, measures.lost) == (0, [0], [])


def test_lost_energy_is_that_of_elements_that_become_zero() -> None:
    gradients = Gradients([torch.tensor([3.0, 4.0, 2.0**-30])], [])
    assert gradients.lost(FP16, 1.0) == pytest.approx(2.0**-60 / 25)
    assert gradients.lost(FP16, 2.0**10) == 0
    assert best_scale(4.0, FP16) == 2.0**13


def test_bad_batches_have_no_part_in_the_best_scale() -> None:
    running = Run(Case("bad batches: 1% x 100", "auto", "fp16", False, 0, 2))
    loss = next(iter(running.task.turns(0))).loss
    optimizer = torch.optim.SGD(running.task.model.parameters(), 0.0)
    running.task.turns = lambda step: [Turn(optimizer, lambda: loss() * (1 + 99 * step), bad=step == 1)]  # type: ignore[method-assign]
    running.step(0)
    alone = list(running.measures.amax)
    running.step(1)
    assert running.measures.amax == alone
    assert len(alone) == 1


def test_the_best_scale_is_that_of_the_run_in_fp32() -> None:
    task = "fine-tuning, 3 steps"
    running = Run(Case(task, "FP32", "fp32", False, 0, 3))
    for step in range(3):
        running.step(step)
    assert len(running.measures.amax) == 3
    assert early_amax(task, clips=False, seed=0) == max(running.measures.amax)


def test_the_tasks_say_which_batches_are_bad() -> None:
    for name in ("bad batches: 1% x 100", "CNN, bad batches: 1% x 100"):
        task = TASKS[name].make(0)
        with torch.no_grad():
            found = [(turn.bad, turn.loss().item()) for step in range(200) for turn in task.turns(step)]
        assert 0 < sum(bad for bad, _ in found) < 10
        assert all(bad == (loss > 50) for bad, loss in found)


@pytest.mark.parametrize(
    ("name", "share"),
    [("detection, bad batches: 0.5% pixels x 255", 0.005), ("clicks, bad batches: 0.5% without logarithm", 0.005)],
)
def test_batches_in_another_unit_are_rare_and_scored_in_the_usual_one(name: str, share: float) -> None:
    task = TASKS[name].make(0)
    with torch.no_grad():
        found = [(turn.bad, turn.loss().item() == task.score([])) for step in range(800) for turn in task.turns(step)]
    assert 0 < sum(bad for bad, _ in found) < 2.5 * share * 800
    assert all(usual is not bad for bad, usual in found)


def test_the_derivatives_of_the_physics_informed_network_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    curve = Curve()
    for bias in curve.biases:
        nn.init.normal_(bias)
    inputs = torch.rand(8, 1, requires_grad=True)
    value, first, second = curve(inputs)
    (expected,) = torch.autograd.grad(value.sum(), inputs, create_graph=True)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, torch.autograd.grad(expected.sum(), inputs)[0])


def test_bad_batches_with_a_finite_loss_have_an_infinite_gradient_and_are_skipped_in_any_precision() -> None:
    name = "bad batches: 2% infinite gradients"
    task = TASKS[name].make(0)
    for step in range(100):
        for turn in task.turns(step):
            task.model.zero_grad()
            loss = turn.loss()
            loss.backward()
            finite = all(bool(each.grad.isfinite().all()) for each in task.model.parameters() if each.grad is not None)
            assert loss.isfinite()
            assert finite is not turn.bad
    for rule, format in (("FP32", "fp32"), ("torch", "fp16")):
        figures = run(Case(name, rule, format, False, 0, 100))
        assert figures["skipped"] == 1
        assert math.isfinite(figures["final"])
        assert math.isfinite(figures["lost"])


HELD_OUT = [name for name, spec in TASKS.items() if spec.held_out]


@pytest.mark.parametrize("name", HELD_OUT)
def test_held_out_tasks_train_in_fp16_and_are_the_same_for_every_rule(name: str) -> None:
    ours, theirs = (TASKS[name].make(1) for _ in range(2))
    with torch.no_grad():
        for step in range(2):
            for turn, other in zip(ours.turns(step), theirs.turns(step), strict=True):
                assert turn.loss().item() == other.loss().item()
    figures = run(Case(name, "torch", "fp16", True, 0, 5))
    assert math.isfinite(figures["final"])
    assert figures["applied"] + figures["skipped"] == 5


def test_a_scale_counts_for_the_step_that_is_applied_with_it() -> None:
    measures = Measures()
    for scale, applied in [(2.0**16, False), (2.0**12, False), (2.0**10, True), (2.0**11, True)]:
        measures.note_step(scale, applied)
    measures.scores = [0.0]
    assert measures.summary(best=2.0**13)["steps_to_best"] == 3
    assert measures.summary(best=2.0**13)["lowest_scale"] == 10
    assert (measures.applied, measures.skipped) == (2, 2)


def test_a_warmed_up_task_is_the_same_each_time() -> None:
    trouble = Trouble(loss_factor=128, warm_steps=5)

    def losses(task: LanguageTask) -> list[float]:
        found = []
        for step in range(3):
            for turn in task.turns(step):
                task.model.zero_grad()
                loss = turn.loss()
                loss.backward()
                turn.optimizer.step()
                found.append(loss.item())
        return found

    expected = losses(LanguageTask(1, trouble))
    assert losses(warmed_up(1, trouble)) == expected
    assert losses(warmed_up(1, trouble)) == expected


SHORT = [Case("fine-tuning, 3 steps", rule, "fp16", False, 0, 3) for rule in ("torch", "auto", "Megatron")]


@pytest.mark.slow
def test_rows_do_not_depend_on_the_number_of_processes() -> None:
    # Both in processes of one thread: this one may have more, and then sums round differently.
    one, two = ({case: row | {"cpu_s": None} for case, row in run_all(SHORT, count, math.inf)} for count in (1, 2))
    assert one == two


def fail(case: Case) -> dict[str, Any]:
    raise SystemExit(3)


def test_a_run_that_fails_ends_the_study_and_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"has ended; see its error above. Case: fine-tuning, 3 steps \| fp16"):
        list(run_all(SHORT, 2, math.inf, fail))


def test_no_run_is_started_after_the_end() -> None:
    assert list(run_all(SHORT, 2, time.monotonic())) == []


INTERRUPTED = """
import signal
import time
from pathlib import Path
from benchmarks.study.training import Case
from benchmarks.study.workers import run_all

def waiting(case):
    print("started", case.seed, flush=True)
    while not Path(__file__).with_name("go").exists():
        time.sleep(0.01)
    return {"seed": case.seed}

if __name__ == "__main__":
    # A shell that starts its programs in the background makes them ignore Ctrl-C, and those that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cases = [Case("GAN", "auto", "fp16", False, seed, 1) for seed in range(9)]
    rows = [row["seed"] for _, row in run_all(cases, 2, float("inf"), waiting)]
    print("rows", sorted(rows), flush=True)
"""


def interrupted(folder: Path, times: int) -> str:
    """Returns what a program prints that is sent Ctrl-C `times` times while two runs are in progress."""
    script = folder / "program.py"
    script.write_text(INTERRUPTED)
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(root / "src")])
    program = subprocess.Popen(
        [sys.executable, script],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None
    assert program.stderr is not None
    printed = program.stdout.readline() + program.stdout.readline()
    for _ in range(times):
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to the workers, too
        while "Ctrl-C again" not in (line := program.stderr.readline()) and "KeyboardInterrupt" not in line:
            assert line
    (folder / "go").touch()
    return printed + program.communicate(timeout=60)[0]


@pytest.mark.skipif(os.name != "posix", reason="sends signals to a group of processes")
@pytest.mark.slow
def test_ctrl_c_keeps_the_rows_of_the_runs_in_progress_and_starts_no_other(tmp_path: Path) -> None:
    printed = interrupted(tmp_path, times=1)
    assert printed.splitlines()[-1] == "rows [0, 1]"
    assert "started 2" not in printed


@pytest.mark.skipif(os.name != "posix", reason="sends signals to a group of processes")
@pytest.mark.slow
def test_a_second_ctrl_c_gives_the_runs_in_progress_up(tmp_path: Path) -> None:
    assert "rows" not in interrupted(tmp_path, times=2)


def test_the_commit_has_a_plus_if_the_code_was_changed(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    code, results = tmp_path / "benchmarks" / "study" / "plan.py", tmp_path / "benchmarks" / "study" / "results.json"
    code.parent.mkdir(parents=True)
    code.write_text("1")
    results.write_text("1")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    clean = commit(tmp_path)
    assert clean is not None
    assert clean.isalnum()
    results.write_text("2")
    assert commit(tmp_path) == clean
    code.write_text("2")
    assert commit(tmp_path) == f"{clean}+"


def test_rows_know_the_entry_that_made_them_also_if_it_is_not_the_last(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    for made_by, key in (({"commit": "a"}, "one"), ({"commit": "b"}, "two"), ({"commit": "a"}, "three")):
        results.start(made_by)
        results.add(key, row("auto"))
    again = Results(tmp_path / "results.json")
    assert {key: again.made_by[each["made_by"]] for key, each in again.rows.items()} == {
        "one": {"commit": "a"},
        "two": {"commit": "b"},
        "three": {"commit": "a"},
    }
    assert list(again.rows) == ["one", "three", "two"]


def test_a_run_measures_what_the_policy_did() -> None:
    found = run(Case("fine-tuning, 3 steps", "torch", "fp16", False, 0, 3))
    assert (found["skipped"], found["applied"]) == (3, 0)
    found = run(Case("fine-tuning, 3 steps", "auto", "fp16", False, 0, 3))
    assert (found["skipped"], found["applied"]) == (0, 3)
    assert found["steps_to_best"] <= 3
    assert math.isfinite(found["final"])
