"""The demo: networks on real data in true FP16 and emulated FP8, with and without loss scaling.

Read the `train.py` of a framework first: its loop is how `gradscale.numpy`, `gradscale.torch`, `gradscale.jax` and
`gradscale.mxnet` are used.
"""

import os

from gradscale.demo.run import FP8_WAYS, WAYS, Comparison, Demo, Run

__all__ = ["FP8_WAYS", "FRAMEWORKS", "WAYS", "Comparison", "Demo", "Run", "load_demo"]

FRAMEWORKS = {"torch": ("torch",), "jax": ("jax", "optax"), "mxnet": ("mxnet",), "numpy": ("numpy",)}
"""Frameworks that have a demo, and the packages it needs. The first that is installed is the one to show."""


def load_demo(framework: str) -> Demo:
    """Returns the demo of a framework, which it imports."""
    if framework == "torch":
        from gradscale.demo.torch import DEMO
    elif framework == "jax":
        from gradscale.demo.jax import DEMO
    elif framework == "mxnet":
        # Read when MXNet is loaded. Arrays this small are faster on one thread, and on a busy machine by far.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        from gradscale.demo.mxnet import DEMO
    else:
        from gradscale.demo.numpy import DEMO
    return DEMO
