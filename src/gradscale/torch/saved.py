"""A scaler's saved state, read whoever wrote it."""

from collections.abc import Mapping
from typing import Any

from gradscale.engine import saved
from gradscale.peers import import_state
from gradscale.policies.contract import Policy, ScaleState


def read_saved(mapping: Mapping[str, Any], system: str | None) -> tuple[Policy, ScaleState]:
    """Returns the policy and state that a scaler of gradscale saved, or another system's.

    Args:
        mapping: the dict.
        system: whose dict it is; None for gradscale's own, or torch's `GradScaler`, which is known by its keys.
    """
    if system is None and isinstance(mapping, Mapping) and "_growth_tracker" in mapping:
        system = "torch"
    return saved.read_saved(mapping) if system is None else import_state(system, mapping)
