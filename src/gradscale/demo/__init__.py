"""The demo: networks on real data in true FP16 and emulated FP8, with and without loss scaling.

Read the `train.py` of a framework first: its loop is how `gradscale.torch`, `gradscale.jax`, `gradscale.keras` and
`gradscale.numpy` are used.
"""

from importlib import import_module

from gradscale.demo.run import FP8_WAYS, WAYS, Comparison, Demo, Run

__all__ = ["FP8_WAYS", "FRAMEWORKS", "WAYS", "Comparison", "Demo", "Run", "load_demo"]

FRAMEWORKS: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "jax": ("jax", "optax"),
    "keras": ("keras",),
    "numpy": ("numpy",),
}
"""Frameworks that have a demo, and the packages it needs. The first that is installed is the one to show."""


def load_demo(framework: str) -> Demo:
    """Returns the demo of a framework, which it imports."""
    return import_module(f"gradscale.demo.{framework}").DEMO
