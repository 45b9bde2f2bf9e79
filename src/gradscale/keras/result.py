"""What a step of a custom loop returns: whether it was applied and why not."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import keras
import numpy as np

from gradscale.engine.culprits import Culprit, culprits_of
from gradscale.engine.result import Status
from gradscale.record import Array


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one step. It may be returned from a `tf.function` and from a function that `jax.jit` compiles.

    Its tensors cost nothing to hand around. `skipped`, `status` and `culprits` wait for the device, and so are called
    outside of compiled functions. From `strategy.run` return its tensors one by one; they are the same on all replicas.

    Attributes:
        applied: bool; True if the inner optimizer was run.
        scale: the scale that made the gradients.
        next_scale: the scale of the next step.
        loss_finite: bool; False if the loss was given, and was inf or NaN.
        amax: the largest magnitude of any gradient, unscaled; None if nothing was checked.
        grad_norm: the true norm, unscaled and before the inner optimizer clips; None unless `norm=True` was given.
        sizes: one number per gradient, inf or NaN where the gradient holds one; None if nothing was checked.
        names: paths of the variables, in the order of `sizes`.
        attempted: whether there were gradients at all.
    """

    applied: Array
    scale: Array
    next_scale: Array
    loss_finite: Array
    amax: Array | None
    grad_norm: Array | None
    sizes: Array | None
    names: tuple[str, ...]
    attempted: bool

    STATIC: ClassVar[tuple[str, ...]] = ("names", "attempted")
    """Fields that are part of the program, not of the data."""

    def skipped(self) -> bool:
        """Returns whether variables and inner optimizer were left alone. Waits for the device."""
        return not _on_host(self.applied)

    @property
    def status(self) -> Status:
        """What became of the step. Waits for the device."""
        if not self.attempted:
            return Status.NO_GRADS
        return Status.of(_on_host(self.applied), _on_host(self.loss_finite))

    def culprits(self) -> list[Culprit]:
        """Returns the variables whose gradients were not finite, in their order. Waits for the device.

        Costs no further pass over the gradients: the sizes were kept from the step.
        """
        return culprits_of(self.names, [] if self.sizes is None else _on_host(self.sizes))

    def __tf_flatten__(self) -> tuple[Any, Any]:
        """Returns what is static, and the tensors. `tf.function` calls this."""
        tensors = (self.applied, self.scale, self.next_scale, self.loss_finite, self.amax, self.grad_norm, self.sizes)
        return (self.names, self.attempted), tensors

    @classmethod
    def __tf_unflatten__(cls, static: Any, tensors: Any) -> Self:
        """Returns the result with other tensors in it. `tf.function` calls this."""
        return cls(*tensors, *static)


def _on_host(value: Array) -> Any:
    return np.asarray(keras.ops.convert_to_numpy(value)).tolist()
