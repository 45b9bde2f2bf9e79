"""How large parameters are, for the report of a run that is stuck."""

from typing import Any

import jax.numpy as jnp

from gradscale.engine.diagnosis import Weights
from gradscale.jax.tree import Leaf, split


def weights_of(params: Any) -> Weights | None:
    """Returns how large the parameters of a pytree are; None if it has none. Synchronizes with the device."""
    parts = split(params, "params")
    leaves = [(jnp.asarray(leaf), name) for leaf, name in zip(parts.of(Leaf.TRAINED), parts.names, strict=True)]
    return Weights.of((float(jnp.max(jnp.abs(leaf)).astype(jnp.float32)), name) for leaf, name in leaves if leaf.size)
