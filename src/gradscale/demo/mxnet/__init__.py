"""The demo in MXNet: weights, activations and gradients in FP16, float32 masters, and Gluon's own training loop."""

import os

# Read when MXNet is loaded. Arrays this small are faster on one thread, and on a busy machine by far.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from gradscale.demo.mxnet.compare import DEMO, compare
from gradscale.demo.mxnet.train import Way

__all__ = ["DEMO", "Way", "compare"]
