"""Keras on TensorFlow: eagerly, in graphs, compiled by XLA, and on the replicas of a distribution strategy."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from gradscale._chunks import chunks
from gradscale.engine.measurement import Measurement
from gradscale.formats import FP32
from gradscale.histogram.counts import exponent_histogram
from gradscale.keras.backends import Assign, Counts, Observation, StepPlan, Update, single_call

T = TypeVar("T")

MOST_OF_A_SUM = 2.0**96
"""What a float64 size that does not fit float32 counts as in a sum: it must be finite, and 2**32 of them too."""

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


def measure(grads: Sequence[Any], loss_finite: Any, plan: StepPlan) -> Observation:
    """Returns what this replica finds in its gradients."""
    _check_norm(plan)
    magnitudes = [_magnitudes(grad) for grad in grads]
    # Sums: TensorFlow's `reduce_max` may lose a NaN, a sum cannot.
    sizes = [_sum([_single(tf.reduce_sum(part), MOST_OF_A_SUM) for part in parts]) for parts in magnitudes]
    scaled = [part for parts in plan.to_unscale(magnitudes) for part in parts]
    half = [part for place in plan.half for part in magnitudes[place]]
    measurement = Measurement(
        sizes=tf.stack(sizes),
        total=_sum(plan.to_unscale(sizes)),
        amax=_largest(scaled) if plan.amax else None,
        norm=tf.sqrt(_sum([_squared(part) for part in scaled])) if plan.norm else None,
        upper_share=None if plan.edge is None else _share_above(scaled, plan.edge),
        half_amax=_largest(half) if half else None,
    )
    known = tf.constant(True) if loss_finite is None else loss_finite
    overwrites = _sum([sizes[place] for place in plan.overwrites]) if plan.overwrites else None
    return Observation(measurement, known, overwrites)


def agree(observation: Observation) -> Observation:
    """Returns the worst of what the replicas found: one small all-reduce where there are several.

    Each replica has its own gradients: the inner optimizer sums them after the decision.
    """
    # Keras's own class takes the flag of the first replica, as if gradients were reduced already. They are not.
    context = _replica_context()
    if context.num_replicas_in_sync == 1:
        return observation
    measurement = observation.measurement
    bad_loss = tf.cast(~observation.loss_finite, tf.float32)
    known: dict[str, Any] = measurement._asdict() | {"overwrites": observation.overwrites, "bad_loss": bad_loss}
    sizes = known.pop("sizes")
    # Zeros for what was not read: the collectives of a process share keys, and so one shape under any policy.
    numbers = tf.stack([tf.constant(0.0) if number is None else number for number in known.values()])
    worst = _worst(context, tf.concat([numbers, sizes], 0))
    together = zip(known.items(), tf.unstack(worst[: len(known)]), strict=True)
    agreed = {name: number for (name, mine), number in together if mine is not None}
    loss_finite, overwrites = agreed.pop("bad_loss") == 0, agreed.pop("overwrites", None)
    return Observation(measurement._replace(sizes=worst[len(known) :], **agreed), loss_finite, overwrites)


def multiplied(grads: Sequence[Any], factor: Any) -> list[Any]:
    """Returns gradients, dense or sparse, multiplied by the factor, in float32 or wider."""
    return [keras.ops.multiply(grad, factor) for grad in grads]


def values(grad: Any) -> tf.Tensor:
    """Returns the numbers of a gradient, dense or sparse."""
    return tf.convert_to_tensor(grad.values if isinstance(grad, tf.IndexedSlices | tf.SparseTensor) else grad)


def counts(arrays: Sequence[Any]) -> Counts:
    """Returns arrays by the powers of two of their numbers, counted in NumPy: TensorFlow has no kernel for it."""
    numbers: list[Any] = [keras.ops.convert_to_numpy(array) for array in arrays]
    found = [exponent_histogram(array) for array in numbers]
    return Counts(
        np.stack([each.counts for each in found]),
        np.array([(each.zeros, each.infs, each.nans) for each in found], np.int64),
        np.array([_peak(array) for array in numbers]),
    )


no_grad = nullcontext


def leaves(value: Any, dtype: str) -> list[tf.Tensor]:
    """Returns the elements of a variable's value as tensors without dimensions."""
    return tf.unstack(tf.reshape(tf.cast(value, dtype), [-1]))


def vector(leaves: Sequence[Any], dtype: str) -> tf.Tensor:
    """Returns leaves as a vector."""
    return tf.stack([tf.cast(leaf, dtype) for leaf in leaves])


def gate(applied: tf.Tensor, update: Callable[[], None], variables: Sequence[Any], assign: Assign) -> None:
    """Runs `update` if `applied` holds: a `cond` of the graph, which assigns variables in place."""
    del variables, assign
    tf.cond(applied, lambda: _done(update), tf.no_op)


def merge_call(
    finish: Callable[[Observation | None, Update], T],
    observation: Observation | None,
    update: Callable[[Any, Any, Any], None],
    grads: Sequence[Any],
    variables: Sequence[Any],
) -> T:
    """Returns what `finish` returns, run once for all replicas."""
    # The inner optimizer calls `merge_call` to sum gradients, which a strategy such as `MirroredStrategy` does not
    # support inside a `cond` on a replica. So the `cond` is in the cross-replica context, as in Keras's own class.
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        return single_call(finish, observation, update, grads, variables)

    def cross_replica(strategy: Any, observation: Observation | None, grads: Any, variables: Any) -> T:
        # After `agree` all replicas have the same numbers.
        first = tf.nest.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[0], observation)
        return finish(
            first, lambda factor: strategy.extended.call_for_each_replica(update, args=(grads, variables, factor))
        )

    return _replica_context().merge_call(cross_replica, args=(observation, grads, variables))


def place(value: Any) -> str:
    """Returns `<traced>` in a `tf.function`, `<on ...>` for a tensor that is not in host memory, else nothing."""
    if tf.inside_function() or tf.is_symbolic_tensor(value):
        return "<traced>"
    device = getattr(value, "device", None) or "CPU"
    return "" if "CPU" in device else f"<on {device}>"


def owner(value: Any) -> Any:
    """Returns the graph of a tensor; None if it has a value."""
    return value.graph if tf.is_symbolic_tensor(value) else None


def is_constant(value: Any) -> bool:
    """Returns False: a compiled function reads its variables anew each time."""
    del value
    return False


def _replica_context() -> Any:
    """Returns the context of this replica; raises in a cross-replica context, which has no gradients."""
    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError(
            "A step runs on a replica, with that replica's gradients. Received: a call in a cross-replica context "
            f"of {type(tf.distribute.get_strategy()).__name__}. Call it in a function for `strategy.run`."
        )
    return context


def _check_norm(plan: StepPlan) -> None:
    """Raises if the norm is asked for where no replica has the summed gradients."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if plan.norm and replicas > 1:
        raise ValueError(
            "`norm=True` needs the summed gradients, and replicas sum theirs only in the inner optimizer. "
            f"Received: norm=True on {replicas} replicas. Leave it out."
        )


def _done(update: Callable[[], None]) -> tf.Operation | None:
    """Runs `update`, and returns what the other branch of a `cond` returns."""
    update()
    return tf.no_op()


def _worst(context: Any, mine: tf.Tensor) -> tf.Tensor:
    """Returns the largest of each number over all replicas, NaN above all.

    One collective.
    """
    # `ReduceOp` has a sum and a mean, no maximum, and `all_gather` takes several collectives. So each replica adds its
    # own row to a matrix of zeros. A maximum may lose a NaN, so NaN is sent as a number of its own.
    nans = tf.math.is_nan(mine)
    own = tf.stack([tf.where(nans, tf.constant(0.0), mine), tf.cast(nans, tf.float32)])
    rows = tf.range(context.num_replicas_in_sync)[:, None, None]
    is_own = rows == tf.cast(context.replica_id_in_sync_group, rows.dtype)
    everyone = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.where(is_own, own[None], tf.constant(0.0)))
    worst, nans = tf.unstack(tf.reduce_max(everyone, axis=0))
    return tf.where(nans > 0, float("nan"), worst)


def _magnitudes(grad: Any) -> list[tf.Tensor]:
    """Returns the magnitudes of a gradient, dense or sparse, in float32 or wider. A complex one has two parts."""
    numbers = values(grad)
    parts = [tf.math.real(numbers), tf.math.imag(numbers)] if numbers.dtype.is_complex else [numbers]
    return [tf.abs(part if part.dtype.size >= 4 else tf.cast(part, tf.float32)) for part in parts]


def _peak(array: Any) -> float:
    """Returns the largest magnitude of an array in host memory; NaN where there is one."""
    return float(np.max([0.0, *(np.abs(chunk).max() for chunk in chunks(array) if chunk.size)]))


def _single(size: tf.Tensor, most: float = FP32.max) -> tf.Tensor:
    """Returns a size in float32: `most` for a finite float64 that does not fit."""
    if size.dtype != tf.float64:
        return size
    return tf.cast(tf.where(tf.math.is_finite(size), tf.minimum(size, most), size), tf.float32)


def _sum(numbers: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n(numbers) if numbers else tf.constant(0.0)


def _squared(part: tf.Tensor) -> tf.Tensor:
    """Returns the sum of squares in float32, inf where it does not fit, also of float64 gradients."""
    return tf.cast(tf.reduce_sum(tf.square(part)), tf.float32)


def _largest(magnitudes: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the largest magnitude of all; anything where there is a NaN."""
    # `reduce_max` of an empty tensor is minus infinity.
    return tf.reduce_max(tf.stack([tf.constant(0.0), *(_single(tf.reduce_max(part)) for part in magnitudes)]))


def _share_above(magnitudes: Sequence[tf.Tensor], edge: float) -> tf.Tensor:
    """Returns the share of all elements whose magnitude is above `edge`; inf and NaN are."""
    none = tf.constant(0, tf.int64)
    above = tf.add_n([none, *(tf.math.count_nonzero(tf.logical_not(part <= edge)) for part in magnitudes)])
    elements = tf.add_n([none, *(tf.size(part, tf.int64) for part in magnitudes)])
    return tf.cast(above, tf.float32) / tf.cast(tf.maximum(elements, 1), tf.float32)
