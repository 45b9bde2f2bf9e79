"""What a step returns: whether it was applied and why not, as arrays on the device."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradscale.engine.culprits import Culprit, culprits_of
from gradscale.engine.result import Status

T = TypeVar("T")


def _static() -> Any:
    """Returns a field that is part of the program, not of the data."""
    return field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one step. A pytree: return it from a compiled function, or stack it up in a `scan`.

    Its arrays cost nothing to hand around. `skipped`, `status` and `culprits` wait for the device, and so are called
    outside of compiled functions.

    Attributes:
        applied: bool; True if the gradients are there to be applied, False if they are zeros instead.
        scale: the scale that made the gradients.
        next_scale: the scale of the next step.
        loss_finite: bool; False if the loss was inf or NaN, on this device or another.
        retries: how often the backward pass was run again.
        sizes: one number per gradient, of about its size; inf or NaN where it holds one. None if nothing was checked.
        grad_norm: the true norm, unscaled and before clipping; None unless `clip_norm` or `norm=True` was given.
        amax: the largest magnitude of any gradient, unscaled; None unless the policy needs it.
        names: what the gradients are called, in the order of `sizes`.
        attempted: whether there were gradients at all.
        gated: whether a step can be skipped at all. `NoScaling` checks nothing.
        clip_norm: the bound on the norm, or None.
    """

    applied: Array
    scale: Array
    next_scale: Array
    loss_finite: Array
    retries: Array
    sizes: Array | None
    grad_norm: Array | None
    amax: Array | None
    names: tuple[str, ...] = _static()
    attempted: bool = _static()
    gated: bool = _static()
    clip_norm: float | None = _static()

    def select(self, new: T, old: T) -> T:
        """Returns `new` if the step was applied, else `old`: for running averages, batch statistics and the like.

        Costs a copy of both. Does not wait for the device.
        """
        return jax.tree.map(lambda left, right: jnp.where(self.applied, left, right), new, old)

    def skipped(self) -> bool:
        """Returns whether the step was skipped. Waits for the device."""
        self._check_one()
        return not bool(self.applied)

    @property
    def status(self) -> Status:
        """What became of the step. Waits for the device."""
        self._check_one()
        if not self.attempted:
            return Status.NO_GRADS
        return Status.of(self.applied, self.loss_finite)

    def culprits(self) -> list[Culprit]:
        """Returns the parameters whose gradients were not finite, in their order. Waits for the device.

        Costs no further pass over the gradients: the sizes were kept from the step.
        """
        self._check_one()
        return culprits_of(self.names, [] if self.sizes is None else np.asarray(self.sizes).tolist())

    def _check_one(self) -> None:
        """Raises if this is many results at once."""
        shape = jnp.shape(self.applied)
        if shape:
            raise ValueError(
                "This is known of one step at a time. Received: results stacked up in the shape "
                f"{shape}, by `scan`, `vmap` or `pmap`. Take one: `jax.tree.map(lambda leaf: leaf[0], results)`."
            )
