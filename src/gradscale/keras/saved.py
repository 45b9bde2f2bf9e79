"""Reading the variables of a saved optimizer: of this class and any policy, or of Keras' own, which has fewer."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradscale.keras.packing import EXTRA, OWN, Slot
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import NoScaling, Static

COUNTED = ("applied", "skipped", "consecutive_skips")
"""What goes on when another policy takes over. The rest of a state means nothing to another policy."""


def completed(store: Mapping[str, Any], count: int, slots: Sequence[Slot], before: int) -> Mapping[str, Any]:
    """Returns saved variables by index, with those of the scale's state as this optimizer has them.

    Keras' own class saves fewer of them, and another policy others. The scale and what was counted go on; what the
    policy remembers beside them starts again.

    Args:
        store: variables by index.
        count: how many the optimizer has.
        slots: where the state of the scale goes; the first are those that Keras has too.
        before: how many variables come before the slots.
    """
    shared, extra = before + len(OWN), slots[len(OWN) :]
    values = [store[str(index)] for index in range(len(store.keys()))]
    first_inner = shared + len(values) - (count - len(extra))
    saved = values[shared : max(first_inner, shared)]
    other_inner = not shared <= first_inner <= shared + len(EXTRA) or any(np.ndim(value) != 1 for value in saved)
    if other_inner or [np.shape(value) for value in saved] == [slot.values.shape for slot in extra]:
        return store
    values[shared:first_inner] = [_begun(slot, saved[0] if saved else ()) for slot in extra]
    return {str(index): value for index, value in enumerate(values)}


def _begun(slot: Slot, counters: Any) -> Any:
    """Returns the start of a slot, with what was counted as it was saved. It stands at the same places in all files."""
    values = slot.values.copy()
    places = [place for place, part in enumerate(slot.parts) if part in COUNTED]
    if len(counters):
        values[places] = np.asarray(counters)[places]
    return values


def fitted(state: ScaleState, policy: Policy) -> ScaleState:
    """Returns a saved state with a scale that the policy can have: the settings of today win over those of the file.

    Warns where there is nothing to go on from: Keras' own rule may have saved infinity or zero.
    """
    start = policy.start().scale
    if isinstance(policy, Static | NoScaling):
        return replace(state, scale=start)
    if not LOWEST_SCALE <= state.scale <= HIGHEST_SCALE:
        warnings.warn(
            f"The saved scale is {float(state.scale)}, and no training goes on from there. "
            f"It starts again at {float(start)}.",
            stacklevel=3,
        )
        return replace(state, scale=start)
    low, high = getattr(policy, "min_scale", LOWEST_SCALE), getattr(policy, "max_scale", HIGHEST_SCALE)
    return replace(state, scale=np.clip(np.float32(state.scale), np.float32(low), np.float32(high)))
