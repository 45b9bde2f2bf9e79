"""Reading the variables of a saved optimizer: of this class, or of Keras' own, which has fewer."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradscale.keras.packing import OWN, Slot
from gradscale.policy import HIGHEST_SCALE, LOWEST_SCALE, NoScaling, Policy, Static
from gradscale.state import ScaleState


def completed(store: Mapping[str, Any], count: int, slots: Sequence[Slot], before: int) -> Mapping[str, Any]:
    """Returns saved variables by index; those of Keras' own class with the ones it lacks put in between.

    Args:
        store: variables by index.
        count: how many the optimizer has.
        slots: where the state of the scale goes; the first are those that Keras has too.
        before: how many variables come before the slots.
    """
    extra = slots[len(OWN) :]
    if len(store.keys()) != count - len(extra):
        return store
    shared = before + len(OWN)
    values = [store[str(index)] for index in range(len(store.keys()))]
    values[shared:shared] = [slot.values for slot in extra]
    return {str(index): value for index, value in enumerate(values)}


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
