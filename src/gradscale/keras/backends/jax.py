"""Keras on JAX: everything is a pure function inside, so that a step can be compiled."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import keras
from jax import Array, lax
from jax.core import Tracer
from jax.experimental.sparse import JAXSparse

from gradscale.jax.measure import peak, share_above, square
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
        amax=jnp.max(sizes, where=~is_own, initial=0.0) if asked.amax else jnp.float32(0),
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


def is_constant(value: Any) -> bool:
    """Returns whether a value would be compiled into the function that is being compiled: no argument leads to it."""
    compiling = isinstance(jnp.zeros(()), Tracer)  # JAX traces every operation while it compiles
    return compiling and not isinstance(value, Tracer)


def _values(grad: Any) -> Array:
    """Returns the numbers of a gradient, dense or sparse."""
    return jnp.asarray(grad.data if isinstance(grad, JAXSparse) else grad)


def _sizes(values: Sequence[Array], asked: Asked) -> Array:
    """Returns a number for each gradient, not finite where it is not, in the way that is quickest for what is asked.

    It is the largest magnitude where kinds or the magnitude are asked. XLA looks at gradients that come from FP16 while
    they are FP16, but not at their bits. Finite ones overflow when they are divided by a scale below 1, and only there
    they are read for that.
    """
    if asked.kinds:
        return _stacked(peak, values)
    if asked.amax:
        return _stacked(_peak_or_inf, values)
    flags = _stacked(_inf_unless_finite, values)
    return flags + lax.cond(jnp.asarray(asked.scale) < 1, lambda: _stacked(peak, values), lambda: jnp.zeros_like(flags))


def _stacked(size: Callable[[Array], Array], values: Sequence[Array]) -> Array:
    return jnp.stack([size(value).astype(jnp.float32) for value in values])


def _peak_or_inf(value: Array) -> Array:
    """Returns the largest magnitude; inf where a number is not finite, as a maximum may lose a NaN."""
    known = [jnp.where(jnp.isfinite(part), jnp.abs(part), jnp.inf) for part in real_parts(value)]
    return jnp.max(jnp.stack([jnp.max(part, initial=0.0).astype(jnp.float32) for part in known]))


def _inf_unless_finite(value: Array) -> Array:
    return jnp.where(jnp.all(jnp.isfinite(value)), jnp.float32(0), jnp.inf)


def _sum(squares: Sequence[Array]) -> Array:
    return jnp.sum(jnp.stack([jnp.float32(0), *squares])).astype(jnp.float32)
