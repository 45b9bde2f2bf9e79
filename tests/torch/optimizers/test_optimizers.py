"""Optimizers with each scaler, as the documentation says: a skip holds all, and a run is that without a scale."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torch.optimizers import comparison
from tests.torch.optimizers.cases import OTHERS, TORCH, Case, Layers, usual
from tests.torch.optimizers.comparison import KINDS, Loop, Outcome, compared
from tests.torch.optimizers.page import BEGIN, END, PAGE, is_installed, lines_in, updated

pytestmark = pytest.mark.cpu_only("bits of other kernels")

SGD = Case("SGD", "torch", usual(lr=0.5, momentum=0.5), "torch.optim")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", TORCH, ids=lambda case: case.name)
def test_those_of_torch_hold_in_a_skip_and_are_bit_exact(case: Case, kind: str) -> None:
    if not is_installed(case):
        pytest.skip(f"torch {torch.__version__} has no {case.name}")
    refused = "" if kind == "LossScaler" or not case.closure else "RuntimeError"
    assert compared(case, kind) == Outcome(not refused, not refused, refused)


def test_the_table_has_a_line_for_each() -> None:
    names = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in lines_in(PAGE.read_text())]
    found = [(name.strip("`"), package.rpartition(" ")[0]) for name, package in names]
    assert found == [(case.name, case.package) for case in (*TORCH, *OTHERS)]


def test_a_table_that_is_written_is_read() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert lines_in(updated(page, ["| `a` | 1 |", "| `b` | 2 |"])) == ["| `a` | 1 |", "| `b` | 2 |"]
    assert updated(updated(page, ["| `a` |"]), []).startswith("before\n")
    assert updated(page, []).endswith("\nafter\n")


@pytest.mark.skipif(not all(map(is_installed, OTHERS)), reason="has an environment of its own: make test-optimizers")
def test_the_table_is_what_the_installed_versions_do() -> None:
    command, root = [sys.executable, "-m", "tests.torch.optimizers"], Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-8000:]
    assert json.loads(done.stdout) == lines_in(PAGE.read_text())


def applies_all(loop: Loop) -> Callable[[int], None]:
    """A loop without a scaler, which steps on whatever it has."""

    def step_of(step: int) -> None:
        loop.optimizer.zero_grad()
        loop.loss(step).backward()
        if step == comparison.BAD:
            next(loop.model.parameters()).grad.mul_(2.0)  # type: ignore[union-attr]
        loop.optimizer.step()

    return step_of


def rounds_the_state(loop: Loop) -> Callable[[int], None]:
    """A loop that skips, and loses a bit of the state at the end."""

    def step_of(step: int) -> None:
        if step == comparison.BAD:
            return
        loop.optimizer.zero_grad()
        loop.loss(step).backward()
        loop.optimizer.step()
        if step == comparison.STEPS - 1:
            for state in loop.optimizer.state.values():
                state["momentum_buffer"].mul_(1 + 2**-20)

    return step_of


@pytest.mark.parametrize(
    ("steps_of", "expected"), [(applies_all, Outcome(False, False)), (rounds_the_state, Outcome(True, False))]
)
def test_a_loop_that_does_neither_is_found(steps_of: Any, expected: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "wrong", steps_of)
    assert compared(SGD, "wrong") == expected
    assert [len(list(each.parameters())) for each in (Layers(), Layers(bias=False), Layers(sparse=True))] == [4, 2, 1]
