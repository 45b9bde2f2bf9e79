"""What the scaler refuses: policies, states, losses and bounds that cannot be meant."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from gradscale.numpy.tree import WIDE, FloatArray
from gradscale.policy import check_number
from gradscale.record import numbers
from gradscale.state import ScaleState


def check_policy(policy: Any) -> None:
    """Raises if `policy` is not a policy, or is the class of one."""
    if isinstance(policy, type) or not callable(getattr(policy, "next", None)):
        raise TypeError(f"`policy` must be a policy, such as `Dynamic()`. Received: policy={policy!r}.")
    if "upper_share" in policy.needs and not hasattr(policy, "edge_magnitude"):
        raise TypeError(
            "A policy that needs `upper_share` must say above which edge, as `Histogram.edge_magnitude` does. "
            f"Received: policy={policy!r}."
        )


def check_state(state: Any) -> None:
    """Raises if `state` is not the state of a single scale."""
    if not isinstance(state, ScaleState):
        raise TypeError(f"`state` must be a state, such as `policy.start()` returns. Received: state={state!r}.")
    if any(np.ndim(value) for value in numbers(state).values()):
        raise ValueError(f"`state` must hold one scale, not a vector of them. Received: state={state!r}.")


def check_clip_norm(clip_norm: float | None) -> None:
    """Raises if `clip_norm` is given and is not a positive number."""
    if clip_norm is None:
        return
    check_number("clip_norm", clip_norm)
    if not clip_norm > 0:
        raise ValueError(f"`clip_norm` must be greater than 0. Received: clip_norm={clip_norm!r}.")


def checked_loss(loss: Any) -> FloatArray:
    """Returns `loss` as an array; raises if it is not a real floating-point number, or an array of them."""
    values: FloatArray = np.asarray(loss)
    if values.dtype.name not in WIDE or values.dtype.kind == "c":
        raise TypeError(
            f"`loss` must be a floating-point number or array. Received: loss={loss!r} ({values.dtype.name})."
        )
    return values


def check_saved(mapping: Any) -> None:
    """Raises if `mapping` does not have the two parts that `LossScaler.state_dict` writes."""
    if not isinstance(mapping, Mapping):
        raise TypeError(f"`load_state_dict` takes a mapping. Received: {type(mapping).__name__}.")
    saved = cast(Mapping[Any, Any], mapping)
    keys = {str(key) for key in saved}
    if keys != {"policy", "state"}:
        raise ValueError(
            f"A saved LossScaler has the keys 'policy' and 'state'. Received: {sorted(keys)}. "
            "Another system's state is read by `gradscale.import_state`."
        )
    for key, part in saved.items():
        if not isinstance(part, Mapping):
            raise TypeError(f"`{key}` of a saved LossScaler must be a mapping. Received: {part!r}.")
