"""The demo: networks on real data in true FP16 and emulated FP8, with and without loss scaling.

Read `numpy/train.py` or `torch/train.py` first: their loops are how `gradscale.numpy` and `gradscale.torch` are used.
"""

from gradscale.demo.run import FP8_WAYS, WAYS, Comparison, Demo, Run

__all__ = ["FP8_WAYS", "FRAMEWORKS", "WAYS", "Comparison", "Demo", "Run", "load_demo"]

FRAMEWORKS = ("torch", "numpy")
"""Frameworks that have a demo, the first that is installed being the one to show."""


def load_demo(framework: str) -> Demo:
    """Returns the demo of a framework, which it imports."""
    if framework == "torch":
        from gradscale.demo.torch import DEMO
    else:
        from gradscale.demo.numpy import DEMO
    return DEMO
