"""Leaves out the doctests of modules whose framework is not installed: importing them would fail."""

from importlib.util import find_spec
from pathlib import Path

import pytest

NEEDS = {
    "bench": ("torch",),
    "demo/jax": ("jax", "optax"),
    "demo/keras": ("keras",),
    "demo/mxnet": ("mxnet",),
    "demo/torch": ("torch",),
    "jax": ("jax", "optax"),
    "jax/flax.py": ("flax",),
    "keras": ("keras",),
    "kernels/jax.py": ("jax",),
    "kernels/torch.py": ("torch",),
    "mxnet": ("mxnet",),
    "torch": ("torch",),
}
"""Folders and files of the package, and the packages that they import."""

MISSING = [
    Path(__file__).parent / "src" / "gradscale" / place
    for place, packages in NEEDS.items()
    if not all(map(find_spec, packages))
]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path in MISSING else None
