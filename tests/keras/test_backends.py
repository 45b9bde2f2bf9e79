"""The tests of the folder `backend`, run on each Keras backend in a process of its own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

BODIES = Path(__file__).with_name("backend")
ROOT = BODIES.parents[2]
TIMEOUT_S = 600


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_everything_holds_on_the_backend(backend: str) -> None:
    if find_spec("keras") is None or find_spec(backend) is None:
        pytest.skip(f"Keras on {backend} is not installed")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(BODIES)],
        cwd=ROOT,
        env=os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if run.returncode:
        pytest.fail(f"on {backend}:\n{run.stdout[-8000:]}\n{run.stderr[-2000:]}", pytrace=False)
