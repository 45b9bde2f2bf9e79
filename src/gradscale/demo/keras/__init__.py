"""The demo in Keras: a model with two outputs, compiled with a `LossScaleOptimizer`, on any backend."""

from gradscale.demo.keras.backend import import_keras

import_keras()

from gradscale.demo.keras.compare import DEMO, compare  # noqa: E402
from gradscale.demo.keras.train import Way  # noqa: E402

__all__ = ["DEMO", "Way", "compare"]
