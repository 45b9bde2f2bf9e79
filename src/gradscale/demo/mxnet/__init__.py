"""The demo in MXNet: FP16 weights, activations and gradients, float32 masters, and Gluon's own training loop."""

import os

# Read when MXNet is loaded. Arrays this small are faster on one thread, and on a busy machine by far.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from functools import partial

from gradscale.demo.digits import AUTOENCODER, load_digits
from gradscale.demo.mxnet.train import MXNetTrainer
from gradscale.demo.train import RECIPES, Demo, Experiment

DEMO = Demo(
    RECIPES,
    [Experiment(AUTOENCODER, 800, lambda seed: partial(MXNetTrainer, load_digits(seed), seed), 60.0)],
)
