"""Names that the tests use, as every supported version of JAX has them."""

from importlib import import_module
from typing import Any

import jax


def enable_x64() -> Any:
    """Returns a context in which arrays may have 64 bits."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    return import_module("jax.experimental").enable_x64()


def set_mesh(mesh: Any) -> Any:
    """Returns a context in which `mesh` is the one that arrays are spread over."""
    sharding: Any = jax.sharding
    return jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else sharding.use_mesh(mesh)
