"""The demo: networks on real data in FP16 and emulated FP8, with and without loss scaling. `make demo` runs it.

`loop.py` has the one loop and the comparison. Each `with_*.py` has what one framework adds: a model, and a step of that
loop, which is how `gradscale.torch`, or the module of another framework, is used.
"""

from importlib import import_module

from examples.demo.loop import Demo

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
    return import_module(f"examples.demo.with_{framework}").DEMO
