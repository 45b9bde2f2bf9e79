"""Keras on JAX: everything is a pure function inside, so that a step can be compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.experimental.sparse import JAXSparse

from gradscale.formats import FP32
from gradscale.histogram.counts import ExponentHistogram
from gradscale.keras.backends import Assign, Backend
from gradscale.keras.remember import STATIC, TENSORS, StepResult
from gradscale.kernels.jax import peak, place, real_parts, share_above, square
from gradscale.kernels.jax_exponents import counts_and_peaks

jax.tree_util.register_dataclass(StepResult, data_fields=TENSORS, meta_fields=STATIC)


class Jax(Backend):
    """Eagerly and compiled. An array that `keras.distribution` shards over devices is one: there are no replicas."""

    XP = ARRAYS = jnp

    def sizes(self, values: Sequence[Array], *, peaks: bool, kinds: bool) -> Array:
        """Returns the largest magnitude of each array, not finite where a number is not: one read of each."""
        del peaks
        # XLA reads gradients that were cast from FP16 as FP16, unless their bits are compared, as kinds need.
        return jnp.stack([_single((peak if kinds else _peak_or_inf)(value)) for value in values])

    def norm(self, values: Sequence[Array]) -> Array:
        return jnp.sqrt(jnp.sum(jnp.stack([jnp.float32(0), *map(square, values)])).astype(jnp.float32))

    def share_above(self, values: Sequence[Array], edge: float) -> Array:
        return share_above(values, edge)

    def values(self, grad: Any) -> Array:
        return jnp.asarray(grad.data if isinstance(grad, JAXSparse) else grad)

    def counts(self, arrays: Sequence[Any]) -> list[tuple[ExponentHistogram, float]]:
        """Returns the histogram of each array, and its largest number. Compiled for all of them together."""
        bins, outside, peaks = map(np.asarray, counts_and_peaks(tuple(map(jnp.asarray, arrays))))
        rows = zip(bins.astype(np.int64), *outside.T.astype(np.int64), strict=True)
        return list(zip((ExponentHistogram(*row) for row in rows), peaks.tolist(), strict=True))

    def leaves(self, value: Any, dtype: str) -> list[Array]:
        return list(jnp.ravel(jnp.asarray(value, dtype)))

    def vector(self, leaves: Sequence[Array], dtype: str) -> Array:
        return jnp.stack([jnp.asarray(leaf, dtype) for leaf in leaves])

    def gate(self, applied: Array, update: Callable[[], None], variables: Sequence[Any], assign: Assign) -> None:
        """Runs `update` if `applied` holds: inside a `cond` where the step is compiled; otherwise `applied` is read."""
        if not isinstance(applied, Tracer):
            return super().gate(applied, update, variables, assign)
        # One `cond` around the whole update. The rule stays outside: every array that goes through a `cond` costs time.
        before = [variable.value for variable in variables]

        # Keras assigns variables; a branch must return arrays. The scope turns one into the other.
        def after() -> list[Any]:
            with keras.StatelessScope(state_mapping=list(zip(variables, before, strict=True))) as scope:
                update()
            return [scope.get_current_value(variable) for variable in variables]

        for variable, value in zip(variables, lax.cond(applied, after, lambda: before), strict=True):
            assign(variable, value)

    def place(self, value: Any) -> str:
        return place(value)

    def owner(self, value: Any) -> Any:
        """Returns the trace of a value; None if it is an array.

        A flag that is computed inside `jax.grad` is one of the trace around it: it has no derivative.
        """
        return value._trace if isinstance(value, Tracer) else None

    def is_constant(self, value: Any) -> bool:
        compiling = isinstance(jnp.zeros(()), Tracer)  # under a trace, JAX stages even an operation without arguments
        return compiling and not isinstance(value, Tracer)


def _single(size: Array) -> Array:
    """Returns a size in float32: the largest float32 for a finite float64 that does not fit."""
    if size.dtype != jnp.float64:
        return size.astype(jnp.float32)
    return jnp.where(jnp.isfinite(size), jnp.minimum(size, FP32.max), size).astype(jnp.float32)


def _peak_or_inf(value: Array) -> Array:
    """Returns the largest magnitude; inf where a number is not finite."""
    # `max(abs(x))` alone may lose a NaN in XLA's CPU kernel.
    known = [jnp.where(jnp.isfinite(part), jnp.abs(part), jnp.inf) for part in real_parts(value)]
    return jnp.max(jnp.stack([jnp.max(part, initial=0.0) for part in known]))


BACKEND = Jax()
