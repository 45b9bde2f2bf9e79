"""Remember, the last stage: the result of a step, as arrays on the device, and how large the weights are."""

from dataclasses import dataclass, fields
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gradscale.engine import result as engine
from gradscale.engine.culprits import Culprit
from gradscale.engine.health import Weights
from gradscale.engine.result import ScaleDesync, to_be_called
from gradscale.jax.tree import Leaf, split
from gradscale.kernels.jax import shown

T = TypeVar("T")

STATIC = ("attempted", "counts", "names", "gated", "clip_norm")
"""Fields of a result that are part of the compiled program, not of its data."""


@dataclass(kw_only=True, eq=False, repr=False)
class StepResult(engine.StepResult):
    """The result of one step. A pytree: return it from a compiled function, or stack it in a `scan`.

    The attributes that it shares with every other adapter are arrays, and reading them does not synchronize. `skipped`,
    `status` and `culprits` synchronize with the device, and so are called outside of compiled functions. They raise
    `ScaleDesync` where the step found that the devices have different scales; it was then skipped on all of them.

    Attributes:
        gated: whether a step can be skipped at all. `NoScaling` checks nothing.
        clip_norm: the bound on the norm, or None.
        scale_range: lowest and highest scale of the devices that share it; None where no axis is mapped.
    """

    gated: bool = True
    clip_norm: float | None = None
    scale_range: Any = None

    def select(self, new: T, old: T) -> T:
        """Returns `new` if the step was applied, else `old`: for batch statistics and other state outside `apply`.

        Copies both. Does not synchronize with the device.
        """
        return jax.tree.map(lambda left, right: jnp.where(self.applied, left, right), new, old)

    @to_be_called
    def skipped(self) -> bool:
        """Returns whether weights and optimizer state were left as they were. Synchronizes with the device."""
        self._check_one()
        return super().skipped()

    @to_be_called
    def culprits(self) -> list[Culprit]:
        """Returns the parameters whose gradients were not finite, in their order. Synchronizes with the device.

        Does not read the gradients again: the sizes were kept from the step.
        """
        self._check_one()
        return super().culprits()

    @staticmethod
    def _shown(value: Any) -> Any:
        return shown(value)

    def _check_one(self) -> None:
        """Raises if this is a stack of results, or if devices found that their scales differ."""
        shape = jnp.shape(self.applied)
        if shape:
            raise ValueError(
                "Call this on the result of one step. Received: results stacked in the shape "
                f"{shape}, by `scan`, `vmap` or `pmap`. Take one: `jax.tree.map(lambda leaf: leaf[0], results)`."
            )
        # Copied first: an operation on an array of several processes must be run by all of them.
        lowest, highest = (0.0, 0.0) if self.scale_range is None else np.asarray(self.scale_range).tolist()
        if lowest != highest:
            raise ScaleDesync(
                "A scale must be the same on all devices that share it. "
                f"Received: scales from {lowest:g} to {highest:g}. Every step is skipped until they are. Start all "
                "devices from one scaler; for independent scales pass `axis_names=()`."
            )


DATA = [field.name for field in fields(StepResult) if field.name not in STATIC]

jax.tree_util.register_dataclass(StepResult, DATA, list(STATIC))


def weights_of(params: Any) -> Weights | None:
    """Returns how large the parameters of a pytree are; None if it has none. Synchronizes with the device."""
    parts = split(params, "params")
    leaves = [(jnp.asarray(leaf), name) for leaf, name in zip(parts.of(Leaf.TRAINED), parts.names, strict=True)]
    return Weights.of((float(jnp.max(jnp.abs(leaf)).astype(jnp.float32)), name) for leaf, name in leaves if leaf.size)
