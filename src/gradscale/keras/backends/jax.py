"""Keras on JAX: everything is a pure function inside, so that a step can be compiled."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import keras
from jax import Array, lax
from jax.core import Tracer
from jax.experimental.sparse import JAXSparse

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
    """Returns what was found in the gradients. Compiled, it reads each once.

    Arrays that `keras.distribution` has spread over devices are one array here, so there is nothing to agree on.
    """
    parts = [_parts(grad) for grad in grads]
    sizes = [_size(part) for part in parts]
    scaled = [part for part, overwrites_it in zip(parts, overwrites, strict=True) if not overwrites_it]
    return Measured(
        sizes=jnp.stack([_told(part, size) for part, size in zip(parts, sizes, strict=True)] if asked.kinds else sizes),
        total=_largest([size for size, own in zip(sizes, overwrites, strict=True) if not own]),
        overwrites=_largest([size for size, own in zip(sizes, overwrites, strict=True) if own]),
        norm=_norm(scaled) if asked.norm else jnp.float32(0),
        share=jnp.float32(0) if asked.edge is None else _share_above(scaled, asked.edge),
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


def _parts(grad: Any) -> list[Array]:
    """Returns the numbers of a gradient, dense or sparse, complex or not, as real arrays."""
    return list(real_parts(jnp.asarray(grad.data if isinstance(grad, JAXSparse) else grad)))


def _size(parts: Sequence[Array]) -> Array:
    """Returns the largest magnitude, inf where one is not finite. A maximum alone may lose a NaN."""
    known = [jnp.where(jnp.isfinite(part), jnp.abs(part), jnp.inf) for part in parts]
    return _largest([jnp.max(part, initial=0.0).astype(jnp.float32) for part in known])


def _told(parts: Sequence[Array], size: Array) -> Array:
    """Returns the size, or NaN where there is one."""
    has_nan = jnp.any(jnp.stack([jnp.any(jnp.isnan(part)) for part in parts]))
    return jnp.where(has_nan, jnp.nan, size)


def _largest(sizes: Sequence[Array]) -> Array:
    return jnp.max(jnp.stack([jnp.float32(0), *sizes]))


def _norm(gradients: Sequence[Sequence[Array]]) -> Array:
    wide = [part.astype(jnp.float32) for parts in gradients for part in parts]
    return jnp.sqrt(jnp.sum(jnp.stack([jnp.float32(0), *(jnp.sum(jnp.square(part)) for part in wide)])))


def _share_above(gradients: Sequence[Sequence[Array]], edge: float) -> Array:
    """Returns the share of all elements whose magnitude is above `edge`; inf and NaN are."""
    wide = [part.astype(jnp.float32) for parts in gradients for part in parts]
    counts = [jnp.sum(~(jnp.abs(part) <= edge)).astype(jnp.float32) for part in wide]
    return jnp.sum(jnp.stack([jnp.float32(0), *counts])) / max(1, sum(part.size for part in wide))
