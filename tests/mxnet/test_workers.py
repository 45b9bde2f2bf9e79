"""Workers that share a key-value store take every step together, or none of them does."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mxnet import gluon
from tests.mxnet.helpers import backward, make_parameter, weights

from gradscale import Dynamic
from gradscale.mxnet import init_trainer

ROOT = Path(__file__).parents[2]
ROLES = ("scheduler", "server", "worker", "worker")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def steps() -> list[Any]:
    """Returns what each of two workers says about its four steps."""
    shared = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port()), "DMLC_NUM_WORKER": "2"}
    shared |= {"DMLC_NUM_SERVER": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.mxnet.worker"],
            env=os.environ | shared | {"DMLC_ROLE": role},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for role in ROLES
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [[json.loads(line) for line in text.splitlines()] for text in printed[2:]]


@pytest.mark.slow
def test_gradients_of_all_workers_are_added_up(steps: list[Any]) -> None:
    for worker in steps:
        assert worker[0] == ["applied", 65536.0, [[0.5, 0.75, 0.0]]]


@pytest.mark.slow
def test_an_overflow_of_one_worker_skips_the_step_on_all(steps: list[Any]) -> None:
    for worker in steps:
        assert worker[1] == ["overflow", 32768.0, [[0.5, 0.75, 0.0]]]


@pytest.mark.slow
def test_a_loss_of_one_worker_that_is_not_finite_skips_the_step_on_all(steps: list[Any]) -> None:
    for worker in steps:
        assert worker[2] == ["nonfinite_loss", 32768.0, [[0.5, 0.75, 0.0]]]


@pytest.mark.slow
def test_an_overflow_that_one_worker_edits_away_skips_the_step_on_all(steps: list[Any]) -> None:
    for worker in steps:
        assert worker[3] == ["overflow", 16384.0, [[0.5, 0.75, 0.0]]]


class OtherMeans(gluon.Trainer):
    """A trainer that adds up gradients by means of its own, as Horovod's does."""

    def _allreduce_grads(self) -> None:
        for param in self._params:
            param.grad()[:] *= 2


def test_workers_that_cannot_be_asked_decide_by_their_gradients_alone() -> None:
    trainer = OtherMeans([make_parameter()], "sgd", {"learning_rate": 1.0}, kvstore=None)
    scaler = init_trainer(trainer, Dynamic())
    backward(trainer, (0.25, 0.0, 0.0), value=float("nan"))
    trainer.step(1)
    assert (scaler.last.applied, weights(trainer)) == (True, [[0.5, 1.0, 1.0]])
    backward(trainer, (float("nan"), 0.0, 0.0), value=float("nan"))
    trainer.step(1)
    assert (scaler.last.applied, weights(trainer)) == (False, [[0.5, 1.0, 1.0]])
