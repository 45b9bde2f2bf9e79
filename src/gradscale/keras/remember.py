"""Remember: the result of a step of a custom loop, and how large the weights are."""

import math
from dataclasses import fields
from typing import Any, Self

import keras
import numpy as np

from gradscale.engine import result
from gradscale.engine.culprits import Culprit, culprits_of
from gradscale.engine.health import Weights
from gradscale.engine.result import to_be_called
from gradscale.keras import backends
from gradscale.record import Array

STATIC = ("retries", "attempted", "counts", "names")
"""Fields of a result that are part of a compiled program, not of its data."""

TENSORS = tuple(field.name for field in fields(result.StepResult) if field.name not in STATIC)


class StepResult(result.StepResult):
    """The result of one step. A `tf.function` and a function under `jax.jit` may return it.

    The attributes are those of every other adapter. `grad_norm` is the norm before the inner optimizer clips, `names`
    are paths of variables, and no step is run again or has its elements counted. `skipped`, `status` and `culprits`
    synchronize with the device, so call them outside compiled functions. From `strategy.run` return the tensors one
    by one; they are the same on all replicas.
    """

    __slots__ = ()

    @to_be_called
    def culprits(self) -> list[Culprit]:
        """Returns the variables whose gradients were not finite, in their order. Synchronizes with the device.

        Does not read the gradients again: the sizes were kept from the step.
        """
        return culprits_of(self.names, [] if self.sizes is None else to_numpy(self.sizes).tolist())

    @staticmethod
    def _shown(value: Any) -> Any:
        if isinstance(value, bool | int):
            return value
        # Looked up here: the module of the JAX backend imports this one.
        return backends.current().place(value) or to_numpy(value).item()

    def __tf_flatten__(self) -> tuple[Any, Any]:
        """Returns what is static, and the tensors. `tf.function` calls this."""
        return tuple(getattr(self, name) for name in STATIC), tuple(getattr(self, name) for name in TENSORS)

    @classmethod
    def __tf_unflatten__(cls, static: Any, tensors: Any) -> Self:
        """Returns the result with other tensors in it. `tf.function` calls this."""
        return cls(**dict(zip(STATIC + TENSORS, (*static, *tensors), strict=True)))


def result_of(step: Any, variables: Any, *, norm: bool) -> StepResult:
    """Returns the result of a `Step` that had gradients of `variables`."""
    tensor = keras.ops.convert_to_tensor
    seen, sizes = step.seen, step.sizes
    return StepResult(
        applied=tensor(step.outcome.applied),
        scale=tensor(step.scale),
        next_scale=tensor(step.outcome.state.scale),
        loss_finite=tensor(seen.loss_finite),
        grad_norm=tensor(seen.norm) if norm else None,
        amax=None if sizes is None else tensor(seen.amax),
        sizes=None if sizes is None else tensor(sizes),
        names=tuple(getattr(variable, "path", None) or variable.name for variable in variables),
    )


def result_without_gradients(scale: Array) -> StepResult:
    """Returns the result of a step without gradients."""
    tensor = keras.ops.convert_to_tensor
    same = tensor(scale)
    return StepResult(applied=tensor(False), scale=same, next_scale=same, loss_finite=tensor(True), attempted=False)


def weights_of(model: Any, at_start: Weights | None = None) -> Weights | None:
    """Returns how large the trainable weights of a model are; None if it has none. Synchronizes with the device.

    `at_start` is what this returned before the first step.
    """
    sizes = [(_largest(variable), variable.path) for variable in model.trainable_variables if math.prod(variable.shape)]
    rate = float(to_numpy(keras.ops.convert_to_tensor(model.optimizer.learning_rate)))
    return Weights.of(sizes, None if at_start is None else at_start.largest, rate)


def _largest(variable: Any) -> float:
    # In float32: a maximum of float16 numbers is not supported by every backend.
    magnitudes = keras.ops.abs(keras.ops.cast(keras.ops.convert_to_tensor(variable.value), "float32"))
    # Twice, because some backends' maximum loses a NaN, and a sum never does.
    total = float(to_numpy(keras.ops.sum(magnitudes)))
    return total if math.isnan(total) else float(to_numpy(keras.ops.max(magnitudes)))


def to_numpy(value: Array) -> Any:
    """Returns a tensor as an array in host memory. Synchronizes with the device."""
    return np.asarray(keras.ops.convert_to_numpy(value))
