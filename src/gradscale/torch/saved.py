"""The saved state of a `LossScaler`, or of another system's scaler, read for `load_state_dict`."""

from collections.abc import Mapping
from typing import Any

from gradscale.engine.saved import Saved, check_state, read_saved
from gradscale.peers import import_state


def read_any(mapping: Any, system: str | None) -> Saved:
    """Returns the saved state of gradscale or of another system; torch's `GradScaler` is recognized by a key."""
    if system is None and isinstance(mapping, Mapping) and "_growth_tracker" in mapping:
        system = "torch"
    if system is None:
        return read_saved(mapping)
    saved = Saved(*import_state(system, mapping))
    check_state(saved.policy, saved.state)
    return saved
