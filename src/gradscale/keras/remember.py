"""Remember: the result of a step of a custom loop, and the metrics of an optimizer."""

from dataclasses import fields
from typing import Any, ClassVar, Self

import keras
import numpy as np

from gradscale.engine import result
from gradscale.engine.culprits import Culprit, culprits_of
from gradscale.engine.metrics import host_metrics
from gradscale.policies.contract import ScaleState
from gradscale.record import Array


class StepResult(result.StepResult):
    """The result of one step. It may be returned from a `tf.function` and from a function that `jax.jit` compiles.

    `skipped`, `status` and `culprits` synchronize with the device, so call them outside of compiled functions. From
    `strategy.run` return its tensors one by one; they are the same on all replicas.

    Attributes:
        applied: whether the inner optimizer was run.
        scale: the scale that made the gradients.
        next_scale: the scale of the next step.
        loss_finite: False if the loss was given, and was inf or NaN.
        grad_norm: norm of all gradients, unscaled and before the inner optimizer clips; inf after an overflow; None
            unless `norm=True` was given.
        amax: largest magnitude of any gradient, unscaled; inf after an overflow; None if nothing was checked.
        retries: 0: a step is not run again here.
        attempted: whether there were gradients at all.
        sizes: one number per gradient, inf or NaN where the gradient holds one; None if nothing was checked.
        counts: empty: elements are not counted here.
        names: paths of the variables, in the order of `sizes`.
    """

    __slots__ = ()

    TENSORS: ClassVar[tuple[str, ...]] = (
        "applied",
        "scale",
        "next_scale",
        "loss_finite",
        "grad_norm",
        "amax",
        "sizes",
    )
    """Fields that are data. The others are part of a compiled program."""

    def culprits(self) -> list[Culprit]:
        """Returns the variables whose gradients were not finite, in their order. Synchronizes with the device.

        Does not read the gradients again: the sizes were kept from the step.
        """
        return culprits_of(self.names, [] if self.sizes is None else _on_host(self.sizes).tolist())

    def __tf_flatten__(self) -> tuple[Any, Any]:
        """Returns what is static, and the tensors. `tf.function` calls this."""
        static = [field.name for field in fields(self) if field.name not in self.TENSORS]
        return tuple((name, getattr(self, name)) for name in static), tuple(
            getattr(self, name) for name in self.TENSORS
        )

    @classmethod
    def __tf_unflatten__(cls, static: Any, tensors: Any) -> Self:
        """Returns the result with other tensors in it. `tf.function` calls this."""
        return cls(**dict(zip(cls.TENSORS, tensors, strict=True)), **dict(static))


def result_of(step: Any, variables: Any, *, norm: bool) -> StepResult:
    """Returns the result of a `Step` that had gradients of `variables`."""
    tensor = keras.ops.convert_to_tensor
    observation, seen = step.observation, step.seen
    return StepResult(
        applied=tensor(step.outcome.applied),
        scale=tensor(step.scale),
        next_scale=tensor(step.outcome.state.scale),
        loss_finite=tensor(seen.loss_finite),
        grad_norm=tensor(seen.norm) if norm else None,
        amax=None if observation is None else tensor(seen.amax),
        sizes=None if observation is None else observation.measurement.sizes,
        names=tuple(getattr(variable, "path", None) or variable.name for variable in variables),
    )


def result_without_gradients(scale: Array) -> StepResult:
    """Returns the result of a step without gradients."""
    tensor = keras.ops.convert_to_tensor
    same = tensor(scale)
    return StepResult(applied=tensor(False), scale=same, next_scale=same, loss_finite=tensor(True), attempted=False)


def metrics_on_host(state: ScaleState, last: result.StepResult | None) -> dict[str, float]:
    """Returns the metrics of an optimizer as Python numbers. Synchronizes with the device.

    Args:
        state: the state of the scale, on the host.
        last: the result of the last step, where there is one.
    """
    sizes = (None, None) if last is None else (last.grad_norm, last.amax)
    return host_metrics(state, *(None if size is None else _on_host(size) for size in sizes))


def _on_host(value: Array) -> Any:
    return np.asarray(keras.ops.convert_to_numpy(value))
