"""Keras on TensorFlow: eagerly, in graphs, compiled by XLA, and on the replicas of a distribution strategy."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import keras
import tensorflow as tf

from gradscale.keras.backends import Asked, Assign, Measured, Update

T = TypeVar("T")

XP = SimpleNamespace(
    where=tf.where,
    logical_and=tf.logical_and,
    logical_or=tf.logical_or,
    logical_not=tf.logical_not,
    isfinite=tf.math.is_finite,
    floor=tf.floor,
    asarray=lambda x, dtype: tf.cast(x, dtype),
    float32=tf.float32,
    float64=tf.float64,
)
"""What a rule may call. `tf.experimental.numpy` would make float64 of a float32 times a Python number."""


def measure(grads: Sequence[Any], overwrites: Sequence[bool], loss: Any, asked: Asked) -> Measured:
    """Returns what all replicas together found in the gradients: one small gather where there are several."""
    _check_norm(asked)
    parts = [_parts(grad) for grad in grads]
    sizes = [_size(part) for part in parts]
    scaled = [part for part, overwrites_it in zip(parts, overwrites, strict=True) if not overwrites_it]
    amax = _largest([size for size, own in zip(sizes, overwrites, strict=True) if not own])
    return _agreed(
        Measured(
            sizes=tf.stack(
                [_told(one, size) for one, size in zip(parts, sizes, strict=True)] if asked.kinds else sizes
            ),
            total=amax,
            overwrites=_largest([size for size, own in zip(sizes, overwrites, strict=True) if own]),
            amax=amax,
            norm=_norm(scaled) if asked.norm else tf.constant(0.0),
            share=tf.constant(0.0) if asked.edge is None else _share_above(scaled, asked.edge),
            loss_finite=tf.constant(True) if loss is None else tf.reduce_all(tf.math.is_finite(loss)),
        )
    )


def divided(grads: Sequence[Any], scale: Any) -> list[Any]:
    """Returns gradients, dense or sparse, divided by the scale, in float32 or wider."""
    return [keras.ops.divide(grad, scale) for grad in grads]


def leaves(value: Any, dtype: str) -> list[tf.Tensor]:
    """Returns the elements of a variable's value as tensors without dimensions."""
    return tf.unstack(tf.reshape(tf.cast(value, dtype), [-1]))


def vector(leaves: Sequence[Any], dtype: str) -> tf.Tensor:
    """Returns leaves as a vector."""
    return tf.stack([tf.cast(leaf, dtype) for leaf in leaves])


def gate(applied: tf.Tensor, update: Callable[[], None], variables: Sequence[Any], assign: Assign) -> None:
    """Runs `update` if `applied` holds: a `cond` of the graph."""
    del variables, assign
    tf.cond(applied, lambda: _done(update), tf.no_op)


def together(
    finish: Callable[[Measured | None, Update], T],
    measured: Measured | None,
    update: Callable[[Any, Any, Any], None],
    grads: Sequence[Any],
    variables: Sequence[Any],
) -> T:
    """Returns what `finish` makes of what was measured and of the update, run once for all replicas.

    A strategy such as `MirroredStrategy` refuses a `cond` on a replica around an update that it has to merge. There
    the decision is made between the replicas, and the update goes back to each of them.
    """
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        return finish(measured, lambda scale: update(grads, variables, scale))

    def between(strategy: Any, measured: Measured | None, grads: Any, variables: Any) -> T:
        first = measured and Measured(*(strategy.experimental_local_results(leaf)[0] for leaf in measured))
        return finish(
            first, lambda scale: strategy.extended.call_for_each_replica(update, args=(grads, variables, scale))
        )

    return tf.distribute.get_replica_context().merge_call(between, args=(measured, grads, variables))


def _check_norm(asked: Asked) -> None:
    """Raises if the norm is wanted where no replica knows it."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if asked.norm and replicas > 1:
        raise ValueError(
            "`norm=True` needs all gradients in one place, and replicas add theirs up only in the inner optimizer. "
            f"Received: norm=True on {replicas} replicas. Leave it out."
        )


def _done(update: Callable[[], None]) -> tf.Operation | None:
    """Runs `update`, and returns what the other branch of a `cond` returns."""
    update()
    return tf.no_op()


def _agreed(measured: Measured) -> Measured:
    """Returns the worst of what the replicas found. Each has its own gradients: they are added up after the gate."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return measured
    nans = tf.math.is_nan(measured.sizes)
    numbers = [measured.total, measured.overwrites, measured.share, tf.cast(~measured.loss_finite, tf.float32)]
    found = tf.concat([numbers, tf.where(nans, tf.constant(0.0), measured.sizes), tf.cast(nans, tf.float32)], 0)
    worst = tf.reduce_max(_gathered(context, found), axis=0)
    sizes, nans = tf.split(worst[len(numbers) :], 2)
    return measured._replace(
        sizes=tf.where(nans > 0, float("nan"), sizes),
        total=worst[0],
        overwrites=worst[1],
        amax=worst[0],
        share=worst[2],
        loss_finite=worst[3] == 0,
    )


def _gathered(context: Any, mine: tf.Tensor) -> tf.Tensor:
    """Returns the vectors of all replicas, one below the other.

    By a sum in which each adds its own row: one collective, where TensorFlow's gather takes several.
    """
    rows = tf.range(context.num_replicas_in_sync)[:, None]
    own_row = rows == tf.cast(context.replica_id_in_sync_group, rows.dtype)
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.where(own_row, mine[None], tf.constant(0.0)))


def _parts(grad: Any) -> list[tf.Tensor]:
    """Returns the numbers of a gradient, dense or sparse, complex or not, as real tensors."""
    values = tf.convert_to_tensor(grad.values if isinstance(grad, tf.IndexedSlices | tf.SparseTensor) else grad)
    return [tf.math.real(values), tf.math.imag(values)] if values.dtype.is_complex else [values]


def _size(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the largest magnitude, inf where one is not finite. A maximum alone may lose a NaN."""
    infinity = float("inf")
    known = [tf.where(tf.math.is_finite(part), tf.abs(part), tf.cast(infinity, part.dtype)) for part in parts]
    # The maximum of nothing is minus infinity.
    return _largest([tf.cast(tf.reduce_max(part), tf.float32) for part in known])


def _told(parts: Sequence[tf.Tensor], size: tf.Tensor) -> tf.Tensor:
    """Returns the size, or NaN where there is one."""
    has_nan = tf.reduce_any([tf.reduce_any(tf.math.is_nan(part)) for part in parts])
    return tf.where(has_nan, float("nan"), size)


def _largest(sizes: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.reduce_max(tf.stack([tf.constant(0.0), *sizes]))


def _norm(gradients: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
    wide = [tf.cast(part, tf.float32) for parts in gradients for part in parts]
    return tf.sqrt(tf.add_n([tf.constant(0.0), *(tf.reduce_sum(tf.square(part)) for part in wide)]))


def _share_above(gradients: Sequence[Sequence[tf.Tensor]], edge: float) -> tf.Tensor:
    """Returns the share of all elements whose magnitude is above `edge`; inf and NaN are."""
    wide = [tf.cast(part, tf.float32) for parts in gradients for part in parts]
    none = tf.constant(0, tf.int64)
    above = tf.add_n([none, *(tf.math.count_nonzero(tf.logical_not(tf.abs(part) <= edge)) for part in wide)])
    elements = tf.add_n([none, *(tf.size(part, tf.int64) for part in wide)])
    return tf.cast(above, tf.float32) / tf.cast(tf.maximum(elements, 1), tf.float32)
