"""The tests of the folder `backend`, run on each Keras backend in a process of its own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

BODIES = Path(__file__).with_name("backend")
ROOT = BODIES.parents[2]
TIMEOUT_S = 1800


def run(backend: str, marked: str) -> None:
    """Runs the tests that are marked so; fails with all they print if one fails."""
    if find_spec("keras") is None or find_spec(backend) is None:
        pytest.skip(f"Keras on {backend} is not installed")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, str(BODIES)],
        cwd=ROOT,
        env=os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if ended.returncode:
        pytest.fail(f"on {backend}:\n{ended.stdout[-8000:]}\n{ended.stderr[-2000:]}", pytrace=False)


# On one backend in `make test`, where the table of conformance runs on all of them.
@pytest.mark.parametrize(
    "backend",
    [pytest.param("tensorflow", marks=pytest.mark.slow), pytest.param("jax", marks=pytest.mark.slow), "torch"],
)
def test_everything_holds_on_the_backend(backend: str) -> None:
    run(backend, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_what_takes_long_holds_too(backend: str) -> None:
    run(backend, "slow")
