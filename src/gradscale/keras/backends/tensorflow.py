"""Keras on TensorFlow: eagerly, in graphs, compiled by XLA, and on the replicas of a distribution strategy."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from gradscale._chunks import chunks
from gradscale.formats import FP32
from gradscale.histogram.counts import ExponentHistogram, exponent_histogram
from gradscale.keras.backends import Assign, Backend, Update

T = TypeVar("T")

NAMESPACE = SimpleNamespace(
    where=tf.where,
    logical_and=tf.logical_and,
    logical_or=tf.logical_or,
    logical_not=tf.logical_not,
    isfinite=tf.math.is_finite,
    max=tf.reduce_max,
    floor=tf.floor,
    asarray=lambda x, dtype: tf.cast(x, dtype),
    float32=tf.float32,
    float64=tf.float64,
)
"""What a rule may call. `tf.experimental.numpy` would make float64 of a float32 times a Python number."""


class TensorFlow(Backend):
    """Eagerly, in graphs, and on several replicas."""

    XP = ARRAYS = NAMESPACE

    def sizes(self, values: Sequence[Any], *, peaks: bool, kinds: bool) -> tf.Tensor:
        """Returns the sum of the magnitudes of each array, or with `peaks` the largest; not finite where one is not."""
        del kinds
        return tf.stack([_size(_magnitudes(value), peaks) for value in values])

    def norm(self, values: Sequence[Any]) -> tf.Tensor:
        """Returns the norm of all arrays together. Raises where no replica has the summed gradients."""
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if replicas > 1:
            raise ValueError(
                "`norm=True` needs the summed gradients, and replicas sum theirs only in the inner optimizer. "
                f"Received: norm=True on {replicas} replicas. Leave it out."
            )
        squares = [tf.reduce_sum(tf.square(part)) for value in values for part in _magnitudes(value)]
        # In float32, inf where it does not fit, also of float64 gradients.
        return tf.sqrt(tf.add_n([tf.constant(0.0), *(tf.cast(square, tf.float32) for square in squares)]))

    def share_above(self, values: Sequence[Any], edge: float) -> tf.Tensor:
        none, magnitudes = tf.constant(0, tf.int64), [part for value in values for part in _magnitudes(value)]
        above = tf.add_n([none, *(tf.math.count_nonzero(tf.logical_not(part <= edge)) for part in magnitudes)])
        elements = tf.add_n([none, *(tf.size(part, tf.int64) for part in magnitudes)])
        return tf.cast(above, tf.float32) / tf.cast(tf.maximum(elements, 1), tf.float32)

    def agree(self, numbers: tf.Tensor) -> tf.Tensor:
        """Returns the largest of each number over all replicas, NaN above all, by one small all-reduce.

        Each replica has its own gradients: the inner optimizer sums them after the decision.
        """
        # Keras's own class takes the flag of the first replica, as if gradients were reduced already. They are not.
        context = _replica_context()
        if context.num_replicas_in_sync == 1:
            return numbers
        # `ReduceOp` has a sum and a mean, no maximum, and `all_gather` takes several collectives. So each replica adds
        # its own row to a matrix of zeros. A maximum may lose a NaN, so NaN is sent as a number of its own.
        nans = tf.math.is_nan(numbers)
        own = tf.stack([tf.where(nans, tf.constant(0.0), numbers), tf.cast(nans, tf.float32)])
        rows = tf.range(context.num_replicas_in_sync)[:, None, None]
        is_own = rows == tf.cast(context.replica_id_in_sync_group, rows.dtype)
        everyone = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.where(is_own, own[None], tf.constant(0.0)))
        worst, nans = tf.unstack(tf.reduce_max(everyone, axis=0))
        return tf.where(nans > 0, float("nan"), worst)

    def values(self, grad: Any) -> tf.Tensor:
        return tf.convert_to_tensor(grad.values if isinstance(grad, tf.IndexedSlices | tf.SparseTensor) else grad)

    def counts(self, arrays: Sequence[Any]) -> list[tuple[ExponentHistogram, float]]:
        """Returns the histogram of each array, and its largest number, by NumPy: TensorFlow has no kernel for it."""
        numbers: list[Any] = [keras.ops.convert_to_numpy(array) for array in arrays]
        return [(exponent_histogram(array), _peak(array)) for array in numbers]

    def leaves(self, value: Any, dtype: str) -> list[tf.Tensor]:
        return tf.unstack(tf.reshape(tf.cast(value, dtype), [-1]))

    def vector(self, leaves: Sequence[Any], dtype: str) -> tf.Tensor:
        return tf.stack([tf.cast(leaf, dtype) for leaf in leaves])

    def gate(self, applied: tf.Tensor, update: Callable[[], None], variables: Sequence[Any], assign: Assign) -> None:
        """Runs `update` if `applied` holds: a `cond` of the graph, which assigns variables in place."""
        del variables, assign
        tf.cond(applied, lambda: _done(update), tf.no_op)

    def merge_call(
        self,
        finish: Callable[[Any, Update], T],
        numbers: tf.Tensor | None,
        update: Callable[[Any, Any, Any], None],
        grads: Sequence[Any],
        variables: Sequence[Any],
    ) -> T:
        """Returns what `finish` returns, run once for all replicas."""
        # The inner optimizer calls `merge_call` to sum gradients, which a strategy such as `MirroredStrategy` does not
        # support inside a `cond` on a replica. So the `cond` is in the cross-replica context, as in Keras's own class.
        if tf.__internal__.distribute.strategy_supports_no_merge_call():
            return Backend.merge_call(self, finish, numbers, update, grads, variables)

        def cross_replica(strategy: Any, numbers: Any, grads: Any, variables: Any) -> T:
            # After `agree` all replicas have the same numbers.
            first = strategy.experimental_local_results(numbers)[0]
            return finish(
                first, lambda factor: strategy.extended.call_for_each_replica(update, args=(grads, variables, factor))
            )

        return _replica_context().merge_call(cross_replica, args=(numbers, grads, variables))

    def place(self, value: Any) -> str:
        """Returns `<traced>` in a `tf.function`, `<on ...>` for a tensor that is not in host memory, else nothing."""
        if tf.inside_function() or tf.is_symbolic_tensor(value):
            return "<traced>"
        device = getattr(value, "device", None) or "CPU"
        return "" if "CPU" in device else f"<on {device}>"

    def owner(self, value: Any) -> Any:
        """Returns the graph of a tensor; None if it has a value."""
        return value.graph if tf.is_symbolic_tensor(value) else None


def _replica_context() -> Any:
    """Returns the context of this replica; raises in a cross-replica context, which has no gradients."""
    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError(
            "A step runs on a replica, with that replica's gradients. Received: a call in a cross-replica context "
            f"of {type(tf.distribute.get_strategy()).__name__}. Call it in a function for `strategy.run`."
        )
    return context


def _done(update: Callable[[], None]) -> tf.Operation | None:
    """Runs `update`, and returns what the other branch of a `cond` returns."""
    update()
    return tf.no_op()


def _magnitudes(numbers: tf.Tensor) -> list[tf.Tensor]:
    """Returns the magnitudes of numbers, in float32 or wider; of complex ones those of both parts."""
    parts = [tf.math.real(numbers), tf.math.imag(numbers)] if numbers.dtype.is_complex else [numbers]
    return [tf.abs(part if part.dtype.size >= 4 else tf.cast(part, tf.float32)) for part in parts]


def _size(magnitudes: Sequence[tf.Tensor], peaks: bool) -> tf.Tensor:
    # A sum cannot lose a NaN, as TensorFlow's `reduce_max` may, whose result for an empty tensor is minus infinity.
    size = tf.add_n([tf.reduce_sum(part) for part in magnitudes])
    if peaks:
        largest = tf.reduce_max(tf.stack([tf.zeros_like(size), *map(tf.reduce_max, magnitudes)]))
        size = tf.where(tf.math.is_finite(size), largest, size)
    # The largest float32 for a finite float64 that does not fit.
    if size.dtype == tf.float64:
        size = tf.cast(tf.where(tf.math.is_finite(size), tf.minimum(size, FP32.max), size), tf.float32)
    return size


def _peak(array: Any) -> float:
    """Returns the largest magnitude of an array in host memory; NaN where there is one."""
    return float(np.max([0.0, *(np.abs(chunk).max() for chunk in chunks(array) if chunk.size)]))


BACKEND = TensorFlow()
