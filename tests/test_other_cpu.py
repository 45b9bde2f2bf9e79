"""`make test-other-cpu` takes vector instructions away from numpy and torch, as they themselves report."""

import os
import subprocess
import sys

import pytest
from tests.other_cpu import beyond_the_baseline, variables

pytest.importorskip("numpy", minversion="2")


def test_numpy_finds_nothing_left_to_disable() -> None:
    found = beyond_the_baseline()
    code = "from tests.other_cpu import ASK_NUMPY; exec(ASK_NUMPY)"
    environment = os.environ | variables(found) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True)
    assert (ended.stdout.split(), ended.stderr) == ([], "")


def test_torch_takes_its_plainest_kernels() -> None:
    pytest.importorskip("torch")
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | variables([]), capture_output=True, text=True)
    assert ended.stdout.strip() == "DEFAULT"
