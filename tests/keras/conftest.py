"""Keeps what needs a Keras backend out of the process that runs all other tests.

A process has one backend, chosen before Keras is imported. `test_backends.py` runs the tests of `backend` in a process
for each. To run them by hand, choose one: `KERAS_BACKEND=jax pytest tests/keras/backend`.
"""

import os

collect_ignore = [] if "KERAS_BACKEND" in os.environ else ["backend"]
