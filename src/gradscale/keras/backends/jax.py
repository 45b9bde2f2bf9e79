"""Keras on JAX: everything is a pure function inside, so that a step can be compiled."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import keras
from jax import Array, lax
from jax.core import Tracer
from jax.experimental.sparse import JAXSparse

from gradscale.jax.measure import half_total, share_above, square
from gradscale.jax.tree import real_parts
from gradscale.keras.backends import Asked, Assign, Measured, Update
from gradscale.keras.result import StepResult

T = TypeVar("T")

XP = jnp

jax.tree_util.register_dataclass(
    StepResult,
    data_fields=[name for name in StepResult.__slots__ if name not in StepResult.STATIC],
    meta_fields=list(StepResult.STATIC),
)


def measure(grads: Sequence[Any], overwrites: Sequence[bool], loss: Any, asked: Asked) -> Measured:
    """Returns what was found in the gradients. Compiled, it reads each once for each number that is asked.

    Arrays that `keras.distribution` has spread over devices are one array here, so there is nothing to agree on.
    """
    values = [_values(grad) for grad in grads]
    scaled = [value for value, own in zip(values, overwrites, strict=True) if not own]
    is_own = jnp.array(overwrites)
    sizes = _sizes(values, asked)
    return Measured(
        sizes=sizes,
        total=jnp.sum(sizes, where=~is_own),
        overwrites=jnp.sum(sizes, where=is_own),
        amax=jnp.max(_peaks(values), where=~is_own, initial=0.0) if asked.amax else jnp.float32(0),
        norm=jnp.sqrt(_sum([square(value) for value in scaled])) if asked.norm else jnp.float32(0),
        share=jnp.float32(0) if asked.edge is None else share_above(scaled, asked.edge),
        loss_finite=jnp.bool_(True) if loss is None else jnp.all(jnp.isfinite(loss)),
    )


def divided(grads: Sequence[Any], scale: Any) -> list[Any]:
    """Returns gradients, dense or sparse, divided by the scale, in float32 or wider."""
    return [keras.ops.divide(grad, scale) for grad in grads]


def leaves(value: Any, dtype: str) -> list[Array]:
    """Returns the elements of a variable's value as arrays without dimensions."""
    return list(jnp.ravel(jnp.asarray(value, dtype)))


def vector(leaves: Sequence[Array], dtype: str) -> Array:
    """Returns leaves as a vector."""
    return jnp.stack([jnp.asarray(leaf, dtype) for leaf in leaves])


def gate(applied: Array, update: Callable[[], None], variables: Sequence[Any], assign: Assign) -> None:
    """Runs `update` if `applied` holds: behind one `cond` where the step is compiled, else after a look at it."""
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


def together(
    finish: Callable[[Measured | None, Update], T],
    measured: Measured | None,
    update: Callable[[Any, Any, Any], None],
    grads: Sequence[Any],
    variables: Sequence[Any],
) -> T:
    """Returns what `finish` makes of what was measured and of the update."""
    return finish(measured, lambda scale: update(grads, variables, scale))


def _values(grad: Any) -> Array:
    """Returns the numbers of a gradient, dense or sparse."""
    return jnp.asarray(grad.data if isinstance(grad, JAXSparse) else grad)


def _sizes(values: Sequence[Array], asked: Asked) -> Array:
    """Returns a number for each gradient, not finite where it is not, in the way that is quickest for what is asked.

    XLA looks at gradients that come from FP16 while they are FP16, which is quicker than any sum. Finite ones overflow
    when they are divided by a scale below 1, and only there they are read for that.
    """
    if asked.kinds:
        return _sums(values)
    if asked.amax:
        return _peaks(values)
    flags = jnp.stack([jnp.where(jnp.all(jnp.isfinite(value)), jnp.float32(0), jnp.inf) for value in values])
    return flags + lax.cond(jnp.asarray(asked.scale) < 1, lambda: _sums(values), lambda: jnp.zeros_like(flags))


def _sums(values: Sequence[Array]) -> Array:
    """Returns the sum of the magnitudes of each gradient: inf or NaN where it holds one."""
    return jnp.stack([half_total(value) * 2 for value in values]).astype(jnp.float32)


def _peaks(values: Sequence[Array]) -> Array:
    """Returns the largest magnitude in each gradient; inf where one is not finite, as a maximum may lose a NaN."""
    return jnp.stack([_peak(value) for value in values])


def _peak(value: Array) -> Array:
    known = [jnp.where(jnp.isfinite(part), jnp.abs(part), jnp.inf) for part in real_parts(value)]
    return jnp.max(jnp.stack([jnp.max(part, initial=0.0).astype(jnp.float32) for part in known]))


def _sum(squares: Sequence[Array]) -> Array:
    return jnp.sum(jnp.stack([jnp.float32(0), *squares])).astype(jnp.float32)
