"""A number of JAX as text, for `repr`, without synchronizing."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer


def place(value: Any) -> str:
    """Returns why an array cannot be read without synchronizing, as in `<on cuda:0>`; nothing where it can."""
    if isinstance(value, Tracer):
        return "<traced>"
    if not isinstance(value, jax.Array):
        return ""
    if value.is_deleted():
        return "<donated>"
    device = min(value.devices(), key=str)
    if device.platform != "cpu" or not value.is_fully_addressable:
        return f"<on {device}>"
    is_ready: Any = getattr(value, "is_ready")  # noqa: B009 - not in the public class, which type checkers know
    return "" if is_ready() else "<not computed yet>"


def shown(value: Any) -> Any:
    """Returns a number that can be read without synchronizing, and for all else a text, as in `<on cuda:0>`.

    Takes leaves of any kind: those of a pytree may be no numbers at all.
    """
    if isinstance(value, bool | int | float):
        return value
    if not isinstance(value, jax.Array | np.generic | np.ndarray):
        return f"<{type(value).__name__}>"
    if elsewhere := place(value):
        return elsewhere
    return f"<shape {value.shape}>" if value.ndim else value.item()
