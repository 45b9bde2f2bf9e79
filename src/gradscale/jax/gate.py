"""The gate of room four: what a step changes, it changes only if it is applied."""

from collections.abc import Callable
from typing import Literal, TypeVar

from jax import lax
from jax.core import Tracer

from gradscale.jax.result import StepResult

T = TypeVar("T")

Gate = Literal["cond", "where"]
"""How to gate: a branch that runs the optimizer only if the step is applied, or a choice after it has run."""


def gated(result: StepResult, change: Callable[[], T], keep: Callable[[], T], gate: Gate = "cond") -> T:
    """Returns what `change` returns if the step is applied, else what `keep` does. Does not wait for the device.

    Outside of `jit` it is always a choice: JAX would compile a branch anew at every call.
    """
    if not result.gated:
        return change()
    if gate == "cond" and isinstance(result.applied, Tracer):
        return lax.cond(result.applied, change, keep)
    return result.select(change(), keep())
