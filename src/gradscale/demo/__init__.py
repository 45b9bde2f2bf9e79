"""The demo: networks on real data in FP16 and emulated FP8, with and without loss scaling.

`train.py` has the one loop and the comparison. The `train.py` of a framework has one step of that loop, which is how
`gradscale.torch`, `gradscale.jax`, `gradscale.keras`, `gradscale.mxnet` or `gradscale.numpy` is used.
"""

from importlib import import_module

from gradscale.demo.run import Comparison, Run
from gradscale.demo.train import Demo, compare

__all__ = ["FRAMEWORKS", "Comparison", "Demo", "Run", "compare", "load_demo"]

FRAMEWORKS: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "jax": ("jax", "optax"),
    "keras": ("keras",),
    "mxnet": ("mxnet",),
    "numpy": ("numpy",),
}
"""Frameworks that have a demo, and the packages it needs. The first that is installed is the default."""


def load_demo(framework: str) -> Demo:
    """Returns the demo of a framework, which it imports."""
    return import_module(f"gradscale.demo.{framework}").DEMO
