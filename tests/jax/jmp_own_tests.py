"""Runs the tests that jmp comes with, on gradscale's classes. A program of its own: the tests are bound at import.

With `--broken` one of the functions is wrong, and the tests must notice.
"""

import sys
import unittest

import jax.numpy as jnp
from jmp._src import loss_scale, policy

from gradscale.jax import jmp

for module in (loss_scale, policy):
    for name in set(vars(module)) & set(jmp.__all__) - {"LossScale"}:
        setattr(module, name, getattr(jmp, name))
if "--broken" in sys.argv:
    loss_scale.all_finite = lambda tree: jnp.array(True)

from jmp._src import loss_scale_test, policy_test  # noqa: E402

suite = unittest.TestSuite(
    unittest.defaultTestLoader.loadTestsFromModule(module) for module in (loss_scale_test, policy_test)
)
result = unittest.TextTestRunner(stream=sys.stdout).run(suite)
sys.exit(not result.wasSuccessful())
