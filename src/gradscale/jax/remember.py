"""Remember, the last stage: the result of a step, as arrays on the device."""

from dataclasses import dataclass, fields
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from gradscale.engine import result as engine
from gradscale.engine.culprits import Culprit
from gradscale.engine.uncalled import to_be_called
from gradscale.kernels.jax_text import shown

T = TypeVar("T")

STATIC = ("attempted", "counts", "names", "gated", "clip_norm")
"""Fields of a result that are part of the compiled program, not of its data."""


@dataclass(kw_only=True, eq=False, repr=False)
class StepResult(engine.StepResult):
    """The result of one step. A pytree: return it from a compiled function, or stack it in a `scan`.

    The attributes that it shares with every other adapter are arrays, and reading them does not synchronize. `skipped`,
    `status` and `culprits` synchronize with the device, and so are called outside of compiled functions.

    Attributes:
        gated: whether a step can be skipped at all. `NoScaling` checks nothing.
        clip_norm: the bound on the norm, or None.
    """

    gated: bool = True
    clip_norm: float | None = None

    def select(self, new: T, old: T) -> T:
        """Returns `new` if the step was applied, else `old`: for batch statistics and other state outside `apply`.

        Copies both. Does not synchronize with the device.
        """
        return jax.tree.map(lambda left, right: jnp.where(self.applied, left, right), new, old)

    @to_be_called
    def skipped(self) -> bool:
        """Returns whether weights and optimizer state were left as they were. Synchronizes with the device."""
        self._check_single()
        return super().skipped()

    @to_be_called
    def culprits(self) -> list[Culprit]:
        """Returns the parameters whose gradients were not finite, in their order. Synchronizes with the device.

        Does not read the gradients again: the sizes were kept from the step.
        """
        self._check_single()
        return super().culprits()

    @staticmethod
    def _shown(value: Any) -> Any:
        return shown(value)

    def _check_single(self) -> None:
        """Raises if this is a stack of results."""
        shape = jnp.shape(self.applied)
        if shape:
            raise ValueError(
                "Call this on the result of one step. Received: results stacked in the shape "
                f"{shape}, by `scan`, `vmap` or `pmap`. Take one: `jax.tree.map(lambda leaf: leaf[0], results)`."
            )


def _register(kind: Any) -> None:
    data = [field.name for field in fields(kind) if field.name not in STATIC]
    jax.tree_util.register_dataclass(kind, data, list(STATIC))


_register(StepResult)
