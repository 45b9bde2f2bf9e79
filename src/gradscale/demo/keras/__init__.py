"""The demo in Keras: a model with two outputs, compiled with a `LossScaleOptimizer`, on any backend."""

from gradscale.demo.keras.backend import import_keras

import_keras()

from gradscale.demo.digits import AUTOENCODER  # noqa: E402
from gradscale.demo.keras.train import load  # noqa: E402
from gradscale.demo.train import RECIPES, Demo, Experiment  # noqa: E402

DEMO = Demo(RECIPES, [Experiment(AUTOENCODER, 600, load, 60.0)])
