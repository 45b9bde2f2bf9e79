"""Keras on JAX: everything is a pure function inside, so that a step can be compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import Array, lax
from jax.core import Tracer
from jax.experimental.sparse import JAXSparse

from gradscale.engine.measurement import Measurement
from gradscale.keras.backends import Assign, Observation, StepPlan, only_observation, single_call
from gradscale.keras.remember import STATIC, TENSORS, StepResult
from gradscale.kernels.jax import peak, real_parts, share_above, square

XP = jnp

# Arrays that `keras.distribution` has spread over devices are one array here: there are no replicas.
agree, merge_call = only_observation, single_call

jax.tree_util.register_dataclass(StepResult, data_fields=TENSORS, meta_fields=STATIC)


def measure(grads: Sequence[Any], loss: Any, plan: StepPlan) -> Observation:
    """Returns what is found in the gradients. Compiled, it reads each once for each number of the plan."""
    values = [_values(grad) for grad in grads]
    sizes = _sizes(values, plan)
    scaled = plan.to_unscale(values)
    own = jnp.array(plan.overwrites, jnp.int32)
    to_unscale = sizes.at[own].set(0.0) if plan.overwrites else sizes
    measurement = Measurement(
        sizes=sizes,
        total=jnp.sum(to_unscale),  # not the maximum, which may lose a NaN
        amax=jnp.max(to_unscale, initial=0.0) if plan.amax else None,
        norm=_norm(scaled, jnp.maximum(jnp.float32(plan.scale), 1.0)) if plan.norm else None,
        upper_share=None if plan.edge is None else share_above(scaled, plan.edge),
        half_amax=jnp.max(_stacked(_peak_or_inf, [values[place] for place in plan.half])) if plan.half else None,
    )
    loss_finite = jnp.bool_(True) if loss is None else jnp.all(jnp.isfinite(loss))
    return Observation(measurement, loss_finite, jnp.sum(sizes[own]) if plan.overwrites else None)


def multiplied(grads: Sequence[Any], factor: Any) -> list[Any]:
    """Returns gradients, dense or sparse, multiplied by the factor, in float32 or wider."""
    return [keras.ops.multiply(grad, factor) for grad in grads]


def leaves(value: Any, dtype: str) -> list[Array]:
    """Returns the elements of a variable's value as arrays without dimensions."""
    return list(jnp.ravel(jnp.asarray(value, dtype)))


def vector(leaves: Sequence[Array], dtype: str) -> Array:
    """Returns leaves as a vector."""
    return jnp.stack([jnp.asarray(leaf, dtype) for leaf in leaves])


def gate(applied: Array, update: Callable[[], None], variables: Sequence[Any], assign: Assign) -> None:
    """Runs `update` if `applied` holds: inside a `cond` where the step is compiled; otherwise `applied` is read.

    One `cond` around the whole update. The rule stays outside, as every array that goes through a `cond` costs time.
    """
    if not isinstance(applied, Tracer):
        if applied:
            update()
        return
    before = [variable.value for variable in variables]

    def after() -> list[Any]:
        with keras.StatelessScope(state_mapping=list(zip(variables, before, strict=True))) as scope:
            update()
        return [scope.get_current_value(variable) for variable in variables]

    for variable, value in zip(variables, lax.cond(applied, after, lambda: before), strict=True):
        assign(variable, value)


def is_constant(value: Any) -> bool:
    """Returns whether a value would be compiled into the function that is being compiled: no argument leads to it."""
    compiling = isinstance(jnp.zeros(()), Tracer)  # JAX traces every operation while it compiles
    return compiling and not isinstance(value, Tracer)


def _values(grad: Any) -> Array:
    """Returns the numbers of a gradient, dense or sparse."""
    return jnp.asarray(grad.data if isinstance(grad, JAXSparse) else grad)


def _sizes(values: Sequence[Array], plan: StepPlan) -> Array:
    """Returns a number for each gradient, not finite where it is not, in the way that is quickest for the plan.

    It is the largest magnitude where the plan has kinds or amax. XLA reads gradients that come from FP16 while they are
    FP16, unless their bits are compared, as kinds need. Finite ones overflow when they are divided by a scale below 1,
    and only then are magnitudes read that the plan does not have.
    """
    if plan.kinds:
        return _stacked(peak, values)
    if plan.amax:
        return _stacked(_peak_or_inf, values)
    flags = _stacked(_inf_unless_finite, values)
    return flags + lax.cond(jnp.asarray(plan.scale) < 1, lambda: _stacked(peak, values), lambda: jnp.zeros_like(flags))


def _stacked(size: Callable[[Array], Array], values: Sequence[Array]) -> Array:
    return jnp.stack([size(value).astype(jnp.float32) for value in values])


def _peak_or_inf(value: Array) -> Array:
    """Returns the largest magnitude; inf where a number is not finite, as a maximum may lose a NaN."""
    known = [jnp.where(jnp.isfinite(part), jnp.abs(part), jnp.inf) for part in real_parts(value)]
    return jnp.max(jnp.stack([jnp.max(part, initial=0.0).astype(jnp.float32) for part in known]))


def _inf_unless_finite(value: Array) -> Array:
    return jnp.where(jnp.all(jnp.isfinite(value)), jnp.float32(0), jnp.inf)


def _norm(gradients: Sequence[Array], scale: Array) -> Array:
    """Returns the norm, from squares of unscaled gradients: those of scaled ones may overflow though all is finite."""
    return jnp.sqrt(_sum([square(gradient * (1.0 / scale)) for gradient in gradients])) * scale


def _sum(squares: Sequence[Array]) -> Array:
    return jnp.sum(jnp.stack([jnp.float32(0), *squares])).astype(jnp.float32)
