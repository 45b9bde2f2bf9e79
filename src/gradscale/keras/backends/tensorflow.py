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
    magnitudes = [_magnitudes(grad) for grad in grads]
    sizes = [_sum([tf.reduce_sum(part) for part in parts]) for parts in magnitudes]
    scaled = [part for parts, own in zip(magnitudes, overwrites, strict=True) if not own for part in parts]
    return _agreed(
        Measured(
            sizes=tf.stack(sizes),
            total=_sum([size for size, own in zip(sizes, overwrites, strict=True) if not own]),
            overwrites=_sum([size for size, own in zip(sizes, overwrites, strict=True) if own]),
            amax=_largest(scaled) if asked.amax else tf.constant(0.0),
            norm=tf.sqrt(_sum([tf.reduce_sum(tf.square(part)) for part in scaled])) if asked.norm else tf.constant(0.0),
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

    return _replica_context().merge_call(between, args=(measured, grads, variables))


def is_constant(value: Any) -> bool:
    """Returns False: a compiled function reads its variables anew each time."""
    del value
    return False


def _replica_context() -> Any:
    """Returns the replica that this runs on; raises between replicas, where there are no gradients of one."""
    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError(
            "A step is taken on a replica, from that replica's gradients. Received: a call between the replicas of a "
            f"{type(tf.distribute.get_strategy()).__name__}. Put the step into a function for `strategy.run`."
        )
    return context


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
    context = _replica_context()
    if context.num_replicas_in_sync == 1:
        return measured
    bad_loss = tf.cast(~measured.loss_finite, tf.float32)
    numbers = [measured.total, measured.overwrites, measured.amax, measured.share, bad_loss]
    worst = _worst(context, tf.concat([numbers, measured.sizes], 0))
    total, overwrites, amax, share, bad_loss = tf.unstack(worst[: len(numbers)])
    return Measured(worst[len(numbers) :], total, overwrites, amax, measured.norm, share, loss_finite=bad_loss == 0)


def _worst(context: Any, mine: tf.Tensor) -> tf.Tensor:
    """Returns the largest of each number over all replicas, NaN above all.

    A maximum may lose a NaN, so that NaN travels as a number of its own. It travels by a sum in which each replica adds
    its own row: one collective, where TensorFlow's gather takes several.
    """
    nans = tf.math.is_nan(mine)
    own = tf.stack([tf.where(nans, tf.constant(0.0), mine), tf.cast(nans, tf.float32)])
    rows = tf.range(context.num_replicas_in_sync)[:, None, None]
    is_own = rows == tf.cast(context.replica_id_in_sync_group, rows.dtype)
    everyone = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.where(is_own, own[None], tf.constant(0.0)))
    worst, nans = tf.unstack(tf.reduce_max(everyone, axis=0))
    return tf.where(nans > 0, float("nan"), worst)


def _magnitudes(grad: Any) -> list[tf.Tensor]:
    """Returns the magnitudes of a gradient, dense or sparse, in float32. A complex one has two parts."""
    values = tf.convert_to_tensor(grad.values if isinstance(grad, tf.IndexedSlices | tf.SparseTensor) else grad)
    parts = [tf.math.real(values), tf.math.imag(values)] if values.dtype.is_complex else [values]
    return [tf.abs(tf.cast(part, tf.float32)) for part in parts]


def _sum(numbers: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n(numbers) if numbers else tf.constant(0.0)


def _largest(magnitudes: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the largest magnitude of all; anything where there is a NaN."""
    # The maximum of nothing is minus infinity.
    return tf.reduce_max(tf.stack([tf.constant(0.0), *(tf.reduce_max(part) for part in magnitudes)]))


def _share_above(magnitudes: Sequence[tf.Tensor], edge: float) -> tf.Tensor:
    """Returns the share of all elements whose magnitude is above `edge`; inf and NaN are."""
    none = tf.constant(0, tf.int64)
    above = tf.add_n([none, *(tf.math.count_nonzero(tf.logical_not(part <= edge)) for part in magnitudes)])
    elements = tf.add_n([none, *(tf.size(part, tf.int64) for part in magnitudes)])
    return tf.cast(above, tf.float32) / tf.cast(tf.maximum(elements, 1), tf.float32)
