"""The demo in MXNet: weights, activations and gradients in FP16, float32 masters, and Gluon's own training loop."""

from gradscale.demo.mxnet.compare import DEMO, compare
from gradscale.demo.mxnet.train import Way

__all__ = ["DEMO", "Way", "compare"]
