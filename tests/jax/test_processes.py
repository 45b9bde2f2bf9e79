"""Two processes that talk to each other: one scale, and the same weights in both."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("two_processes.py")
TIMEOUT_S = 240


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    """Returns what each of the two processes printed at the end."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    port = str(free_port())
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(number), port],
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


@pytest.mark.parametrize("way", ["plain", "retried"])
def test_both_processes_have_the_same_weights_and_scales(reports: Any, way: str) -> None:
    assert reports[0][way] == reports[1][way]


def test_an_overflow_in_one_process_skips_the_step_of_both(reports: Any) -> None:
    applied = [step[0] for step in reports[0]["plain"]["seen"]]
    assert applied == [True, True, False, True, True]
    assert [step[1] for step in reports[0]["plain"]["seen"]][1:3] == [2.0**100, 2.0**99]


def test_a_retry_that_one_process_needs_is_made_by_both(reports: Any) -> None:
    seen = reports[0]["retried"]["seen"]
    assert [step[0] for step in seen] == [True] * 5
    assert seen[2][1] < seen[1][1] == 2.0**100
    assert reports[0]["retried"]["skipped"] == 0
