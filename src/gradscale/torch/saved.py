"""The scaler's state as a plain dict: everything needed to go on bit for bit."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradscale.peers import import_state
from gradscale.policy import Policy
from gradscale.record import numbers
from gradscale.saved import policy_from_dict
from gradscale.state import ScaleState

KEYS = ("policy", "state")


def write_saved(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns the policy and its state as plain Python values. Waits for the device."""
    return {"policy": policy.to_dict(), "state": state.to_dict()}


def read_saved(mapping: Mapping[str, Any], system: str | None) -> tuple[Policy, ScaleState]:
    """Returns the policy and state that `write_saved` wrote, or that another system saved.

    Args:
        mapping: the dict.
        system: whose dict it is; None for gradscale's own, or torch's `GradScaler`, which is known by its keys.
    """
    if system is not None:
        return import_state(system, mapping)
    if not isinstance(mapping, Mapping):
        raise TypeError(f"`load_state_dict` takes what `state_dict` returned. Received: {type(mapping).__name__}.")
    if "_growth_tracker" in mapping:
        return import_state("torch", mapping)
    if set(mapping) != set(KEYS):
        raise ValueError(
            f"A saved LossScaler has the keys {list(KEYS)}. Received: {sorted(map(str, mapping))}. "
            "For another system's state say which: `load_state_dict(mapping, system='deepspeed')`."
        )
    policy = policy_from_dict(mapping["policy"])
    state = type(policy.start()).from_dict(mapping["state"])
    _check_scale(policy, state)
    return policy, state


def _check_scale(policy: Policy, state: ScaleState) -> None:
    """Raises unless there is one scale, and within the bounds of its policy if that has any."""
    if many := sorted(name for name, value in numbers(state).items() if np.ndim(value)):
        raise ValueError(f"A LossScaler has one scale. Received a state of many: {many} are lists.")
    low, high = getattr(policy, "min_scale", 0.0), getattr(policy, "max_scale", np.inf)
    if not low <= state.scale <= high:
        raise ValueError(
            f"The saved scale must lie between the policy's bounds, {low!r} and {high!r}. "
            f"Received: scale={float(state.scale)!r}. The file it came from is damaged."
        )
