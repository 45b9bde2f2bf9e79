"""Runs the tests that jmp comes with, on gradscale's classes. A program of its own: the tests are bound at import.

With `--broken` one of the functions is wrong, and the tests must notice.
"""

import importlib
import sys
import unittest
from typing import Any

import jax.numpy as jnp

from gradscale.jax import jmp

MODULES = ("loss_scale", "policy")


def main() -> None:
    """Puts gradscale's classes in the place of jmp's, and ends with 1 unless all tests pass."""
    for module in map(_module, MODULES):
        for name in set(vars(module)) & set(jmp.__all__) - {"LossScale"}:
            setattr(module, name, getattr(jmp, name))
    if "--broken" in sys.argv:
        _module("loss_scale").all_finite = lambda tree: jnp.array(True)
    tests = [_module(f"{name}_test") for name in MODULES]
    suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromModule, tests))
    result = unittest.TextTestRunner(stream=sys.stdout).run(suite)
    sys.exit(not result.wasSuccessful())


def _module(name: str) -> Any:
    return importlib.import_module(f"jmp._src.{name}")


if __name__ == "__main__":
    main()
