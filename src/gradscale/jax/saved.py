"""Reading and writing a `Scaler` with flax's serialization, the policy's settings included."""

import sys
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from gradscale.engine.saved import policy_from_dict
from gradscale.jax.tree import as_pytree
from gradscale.record import OTHER_KEYS, numbers, with_values


def register_with_flax(kind: type) -> None:
    """Registers how flax writes and reads scalers of the class `kind`, if the program has loaded flax.

    `flax.serialization.to_bytes` refuses a class that is not registered.
    """
    # Importing flax only for this would take longer than importing JAX.
    flax: Any = sys.modules.get("flax.serialization")
    if flax is not None:
        flax.register_serialization_state(kind, to_state_dict, from_state_dict, override=True)


def to_state_dict(scaler: Any) -> dict[str, Any]:
    """Returns the policy's settings and the arrays of the state, which may be vectors."""
    return {"policy": scaler.policy.to_dict(), "state": numbers(scaler.state)}


def from_state_dict(scaler: Any, mapping: Mapping[str, Any]) -> Any:
    """Returns the scaler that `to_state_dict` wrote, with the settings it had then, whatever those of `scaler` are.

    Raises:
        ValueError: the policy is not known, or the state is not one of its states.
    """
    policy = policy_from_dict(mapping["policy"])
    start = as_pytree(policy.start())
    expected, received = sorted(numbers(start)), sorted(mapping["state"])
    if expected != received:
        raise ValueError(
            f"A state of {type(policy).__name__} has the fields {expected}. Received: {received}. {OTHER_KEYS}"
        )
    return scaler.tree_unflatten(policy, (with_values(start, {k: jnp.array(v) for k, v in mapping["state"].items()}),))
