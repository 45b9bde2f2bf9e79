"""Keras on JAX: everything is a pure function inside, so that a step can be compiled."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.experimental.sparse import JAXSparse

from gradscale.engine.measurement import Measurement
from gradscale.formats import FP32
from gradscale.keras.backends import Assign, Counts, Observation, StepPlan, only_observation, single_call
from gradscale.keras.remember import STATIC, TENSORS, StepResult
from gradscale.kernels import jax_text
from gradscale.kernels.jax import peak, real_parts, share_above, square
from gradscale.kernels.jax_exponents import counts_and_peaks

XP = jnp

place = jax_text.place

# An array that `keras.distribution` shards over devices is one array here: there are no replicas.
agree, merge_call = only_observation, single_call

jax.tree_util.register_dataclass(StepResult, data_fields=TENSORS, meta_fields=STATIC)


def measure(grads: Sequence[Any], loss_finite: Any, plan: StepPlan) -> Observation:
    """Returns what is found in the gradients. Compiled, it reads each once for each number of the plan."""
    arrays = [values(grad) for grad in grads]
    sizes = _sizes(arrays, plan)
    scaled = plan.to_unscale(arrays)
    own = jnp.array(plan.overwrites, jnp.int32)
    to_unscale = sizes.at[own].set(0.0) if plan.overwrites else sizes
    measurement = Measurement(
        sizes=sizes,
        total=jnp.max(jnp.where(jnp.isfinite(to_unscale), to_unscale, jnp.inf)),  # a maximum alone may lose a NaN
        amax=jnp.max(to_unscale, initial=0.0) if plan.amax else None,
        norm=jnp.sqrt(_sum([square(gradient) for gradient in scaled])) if plan.norm else None,
        upper_share=None if plan.edge is None else share_above(scaled, plan.edge),
        half_amax=jnp.max(_stacked(_peak_or_inf, [arrays[place] for place in plan.half])) if plan.half else None,
    )
    known = jnp.bool_(True) if loss_finite is None else loss_finite
    return Observation(measurement, known, jnp.sum(sizes[own]) if plan.overwrites else None)


def multiplied(grads: Sequence[Any], factor: Any) -> list[Any]:
    """Returns gradients, dense or sparse, multiplied by the factor, in float32 or wider."""
    return [keras.ops.multiply(grad, factor) for grad in grads]


def values(grad: Any) -> Array:
    """Returns the numbers of a gradient, dense or sparse."""
    return jnp.asarray(grad.data if isinstance(grad, JAXSparse) else grad)


def counts(arrays: Sequence[Any]) -> Counts:
    """Returns arrays by the powers of two of their numbers. Compiled for all of them together."""
    bins, outside, peaks = map(np.asarray, counts_and_peaks(tuple(map(jnp.asarray, arrays))))
    return Counts(bins.astype(np.int64), outside.astype(np.int64), peaks)


no_grad = nullcontext


def leaves(value: Any, dtype: str) -> list[Array]:
    """Returns the elements of a variable's value as arrays without dimensions."""
    return list(jnp.ravel(jnp.asarray(value, dtype)))


def vector(leaves: Sequence[Array], dtype: str) -> Array:
    """Returns leaves as a vector."""
    return jnp.stack([jnp.asarray(leaf, dtype) for leaf in leaves])


def gate(applied: Array, update: Callable[[], None], variables: Sequence[Any], assign: Assign) -> None:
    """Runs `update` if `applied` holds: inside a `cond` where the step is compiled; otherwise `applied` is read."""
    if not isinstance(applied, Tracer):
        if applied:
            update()
        return
    # One `cond` around the whole update. The rule stays outside, as every array that goes through a `cond` costs time.
    before = [variable.value for variable in variables]

    # Keras assigns variables; a branch must return arrays. The scope turns one into the other.
    def after() -> list[Any]:
        with keras.StatelessScope(state_mapping=list(zip(variables, before, strict=True))) as scope:
            update()
        return [scope.get_current_value(variable) for variable in variables]

    for variable, value in zip(variables, lax.cond(applied, after, lambda: before), strict=True):
        assign(variable, value)


def owner(value: Any) -> Any:
    """Returns the trace of a value; None if it is an array.

    A flag that is computed inside `jax.grad` is one of the trace around it: it has no derivative.
    """
    return value._trace if isinstance(value, Tracer) else None


def is_constant(value: Any) -> bool:
    """Returns whether a value would be a constant of the function that is being compiled: not one of its arguments."""
    compiling = isinstance(jnp.zeros(()), Tracer)  # under a trace, JAX stages even an operation without arguments
    return compiling and not isinstance(value, Tracer)


def _sizes(values: Sequence[Array], plan: StepPlan) -> Array:
    """Returns a number for each gradient, not finite where it is not: the largest magnitude if the plan has it."""
    # XLA reads gradients that were cast from FP16 as FP16, unless their bits are compared, as kinds need.
    if plan.kinds:
        return _stacked(peak, values)
    if plan.amax:
        return _stacked(_peak_or_inf, values)
    # A finite gradient can overflow when it is divided by a scale below 1. Only then are its magnitudes needed.
    flags = _stacked(_inf_unless_finite, values)
    return flags + lax.cond(jnp.asarray(plan.scale) < 1, lambda: _stacked(peak, values), lambda: jnp.zeros_like(flags))


def _stacked(size: Callable[[Array], Array], values: Sequence[Array]) -> Array:
    return jnp.stack([_single(size(value)) for value in values])


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


def _inf_unless_finite(value: Array) -> Array:
    return jnp.where(jnp.all(jnp.isfinite(value)), jnp.float32(0), jnp.inf)


def _sum(squares: Sequence[Array]) -> Array:
    return jnp.sum(jnp.stack([jnp.float32(0), *squares])).astype(jnp.float32)
