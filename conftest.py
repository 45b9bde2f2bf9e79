"""Keeps doctest collection away from adapters whose framework is not installed, and tests free of time limits."""

from importlib.util import find_spec

import pytest
from hypothesis import settings

# A loaded machine is no fault of the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

NEEDS = {
    "__main__.py": "typer",
    "cli": "typer",
    "torch": "torch",
    "demo/torch": "torch",
    "bench/compare.py": "torch",
    "bench/steps.py": "torch",
    "bench/targets.py": "torch",
    "bench/traffic.py": "torch",
    "checkup": "torch",
    "kernels/torch.py": "torch",
    "integrations/accelerate": "accelerate",
    "integrations/transformers": "transformers",
    "jax": "jax",
    "kernels/jax.py": "jax",
    "jax/flax.py": "flax",
    "demo/jax": "jax",
    "keras": "keras",
    "keras/backends/tensorflow.py": "tensorflow",
    "keras/backends/jax.py": "jax",
    "keras/backends/torch.py": "torch",
    "demo/keras": "keras",
    "mxnet": "mxnet",
    "demo/mxnet": "mxnet",
    "integrations/lightning": "lightning",
}

collect_ignore = [f"src/gradscale/{path}" for path, framework in NEEDS.items() if find_spec(framework) is None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tests/torch run: cpu, cuda, or sim, which simulates a GPU")
