"""Two processes of two devices that train together: as one process of four, and saved from two to one."""

import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tests.jax.ranks.layouts import Options, Step, compiled, start
from tests.jax.ranks.model import POLICY, batches
from tests.jax.ranks.training import CASES, trained
from tests.jax.ranks.two_processes import RUNS, SAVED_AFTER, STEPS, report

from gradscale.jax import Scaler

pytestmark = [
    pytest.mark.slow,  # two processes that import and compile everything anew
    pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="processes are tested from JAX 0.10 on"),
]

PROGRAM = Path(__file__).with_name("two_processes.py")
ROOT = Path(__file__).parents[3]
TIMEOUT_S = 400


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both processes save."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def reports(folder: Path) -> list[dict[str, Any]]:
    """Returns what each of the two processes printed at the end."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    # `NPROC` of the folder's `conftest.py` is among them.
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    port = str(free_port())
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(number), port, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number in range(2)
    ]
    try:
        ended = [process.communicate(timeout=TIMEOUT_S) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], [errors[-2000:] for _, errors in ended]
    return [json.loads(printed.splitlines()[-1]) for printed, _ in ended]


@pytest.mark.parametrize("case", RUNS)
def test_two_processes_train_as_one_with_four_devices(reports: Any, case: str) -> None:
    one = json.loads(json.dumps(report(CASES[case](RUNS[case], batches(STEPS)))))
    for each in reports:
        assert each["runs"][case] == one


def test_a_retry_that_one_process_needs_is_made_by_both(reports: Any) -> None:
    seen = reports[0]["retried"]["seen"]
    assert reports[0]["retried"] == reports[1]["retried"]
    assert [step[0] for step in seen] == [True] * 5
    assert seen[2][1] < seen[1][1] == 2.0**100
    assert reports[0]["retried"]["skipped"] == 0


def test_a_scaler_that_one_process_has_loaded_alone_is_found_by_both(reports: Any) -> None:
    for each in reports:
        *in_a_step, by_jax = each["parted"]
        for text in in_a_step:
            assert "Received: scales from 1024 to 2048" in text
        assert "not the same on each process" in by_jax


@pytest.mark.usefixtures("reports")
def test_one_process_may_read_a_result_and_a_scaler_alone(folder: Path) -> None:
    status, names, saved = json.loads((folder / "read.json").read_text())
    assert (status, names) == ("overflow", ["out"])
    assert saved == from_json(folder, 1).to_dict()


def from_json(folder: Path, number: int) -> Scaler:
    return Scaler.from_dict(json.loads((folder / f"scaler{number}.json").read_text()))


def from_pickle(folder: Path, number: int) -> Scaler:
    return pickle.loads((folder / f"scaler{number}.pickle").read_bytes())


def from_orbax(folder: Path, _: int) -> Scaler:
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "orbax", Scaler(POLICY))


@pytest.fixture(scope="module")
def step() -> Step:
    return compiled(Options())


@pytest.mark.usefixtures("reports")
@pytest.mark.parametrize("read", [from_json, from_pickle, from_orbax])
@pytest.mark.parametrize("number", [0, 1])
def test_a_run_saved_by_two_processes_continues_in_one(
    folder: Path, step: Step, read: Callable[[Path, int], Scaler], number: int
) -> None:
    rest = pickle.loads((folder / f"rest{number}.pickle").read_bytes())
    continued = trained(step, (*jax.tree.map(jnp.asarray, rest), read(folder, number)), batches(STEPS)[SAVED_AFTER:])
    state, results = trained(step, start(Options()), batches(STEPS))
    assert report(continued) == report((state, results[SAVED_AFTER:]))
