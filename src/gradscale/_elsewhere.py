"""What `gradscale` says about a name that it does not have: which of its modules has it."""

import ast
import pkgutil
import sys
from collections.abc import Iterable
from functools import cache
from typing import NoReturn

from gradscale._nearest import did_you_mean

ADAPTERS = ("torch", "jax", "keras", "mxnet", "numpy")
"""In the order in which they are named."""


def refuse(name: str, known: Iterable[str]) -> NoReturn:
    """Raises an `AttributeError` about a name that `gradscale` does not have: which adapter has it, or the nearest.

    In the statement `from gradscale import name` it is an `ImportError` where an adapter has it. Loads no framework.
    """
    text = f"module 'gradscale' has no attribute {name!r}."
    if name in ADAPTERS:
        raise AttributeError(f"{text} Import it first: `import gradscale.{name}`.", name=name)
    adapters = [] if name.startswith("_") else [adapter for adapter in ADAPTERS if name in _public(adapter)]
    if not adapters:
        raise AttributeError(text + did_you_mean(name, known), name=name)
    text += f" Use `from gradscale.{adapters[0]} import {name}`"
    others = " or ".join(f"`gradscale.{adapter}`" for adapter in adapters[1:])
    text += f", or that of {others}." if others else "."
    # The statement asks importlib first, then replaces an AttributeError with an error of its own, without this text.
    if sys._getframe(2).f_globals.get("__name__") == "importlib._bootstrap":  # pyright: ignore[reportPrivateUsage]
        raise ImportError(text, name="gradscale")
    raise AttributeError(text, name=name)


@cache
def _public(adapter: str) -> tuple[str, ...]:
    """Returns the public names of an adapter, read from its source: to import it would load its framework."""
    try:
        source = pkgutil.get_data("gradscale", f"{adapter}/__init__.py") or b""
    except OSError:  # installed without sources
        return ()
    assigned = {
        target.id: node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return tuple(ast.literal_eval(assigned["__all__"]))
