"""The backend that Keras runs on in the demo: the user's choice, or the first that is installed."""

import os
import sys
from importlib.util import find_spec

BACKENDS = ("torch", "jax", "tensorflow")
"""Backends that can train; the fastest to start comes first."""


def import_keras() -> str:
    """Imports Keras, and returns the name of the backend that it runs on. Leaves the environment as it was.

    Raises:
        ValueError: no backend is installed, or the one that was chosen does not train.
    """
    # TensorFlow would log how it was built, in the middle of the progress bars.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    is_open = "keras" not in sys.modules and not os.environ.get("KERAS_BACKEND")
    if is_open:
        os.environ["KERAS_BACKEND"] = _first_installed()
    import keras

    if is_open:
        del os.environ["KERAS_BACKEND"]
    chosen = keras.config.backend()
    if chosen not in BACKENDS:
        raise ValueError(f"Keras must run on one of {', '.join(BACKENDS)}. Received: {chosen}. Set KERAS_BACKEND.")
    return chosen


def _first_installed() -> str:
    for backend in BACKENDS:
        if find_spec(backend):
            return backend
    raise ValueError(f"Keras runs on one of {', '.join(BACKENDS)}. Received none that is installed: pip install torch.")
