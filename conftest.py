"""Keeps doctest collection away from adapters whose framework is not installed, and tests free of time limits.

Tests, and the processes that they start, compute on one thread: models are small, and workers that all start as many
threads as there are cores wait for each other.
"""

import os
from importlib.util import find_spec

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, which reads it once

# A loaded machine is no fault of the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

NEEDS = {
    "__main__.py": "typer",
    "cli": "typer",
    "torch": "torch",
    "checkup": "torch",
    "kernels/torch.py": "torch",
    "kernels/torch_rounding.py": "torch",
    "kernels/torch_storage.py": "torch",
    "kernels/triton/functions.py": "triton",
    "kernels/triton/operator.py": "torch",
    "integrations/accelerate": "accelerate",
    "integrations/transformers": "transformers",
    "jax": "jax",
    "kernels/jax.py": "jax",
    "jax/flax.py": "flax",
    "keras": "keras",
    "keras/backends/tensorflow.py": "tensorflow",
    "keras/backends/jax.py": "jax",
    "keras/backends/torch.py": "torch",
    "mxnet": "mxnet",
    "integrations/lightning": "lightning",
}

collect_ignore = [f"src/gradscale/{path}" for path, framework in NEEDS.items() if find_spec(framework) is None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tests/torch run: cpu, cuda, or sim, which simulates a GPU")
