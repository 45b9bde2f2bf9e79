"""Names that the tests use, as every supported version of JAX has them."""

from typing import Any

import jax


def enable_x64() -> Any:
    """Returns a context in which arrays may have 64 bits."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64 as of_07

    return of_07()


def set_mesh(mesh: Any) -> Any:
    """Returns a context in which `mesh` is the one that arrays are spread over."""
    return jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(mesh)
