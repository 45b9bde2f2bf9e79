"""A drop-in for flax's `DynamicScale`: the same fields, rule and results, with its bugs fixed.

The rule is that of flax 0.12.8, which grows after `growth_interval` + 1 clean steps; flax has counted differently in
other versions.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradscale._extras import require
from gradscale.jax.axes import Axes, AxisNames
from gradscale.jax.jmp import all_finite
from gradscale.jax.tree import Gradients, Leaf, split
from gradscale.peers.flax import dynamic_scale
from gradscale.peers.ladder import Ladder, LadderState
from gradscale.policies.contract import Seen

require(__name__, "flax")

from flax import struct  # noqa: E402

__all__ = ["DynamicScale", "DynamicScaleResult"]


class DynamicScaleResult(NamedTuple):
    """The result of the function that `DynamicScale.value_and_grad` returns.

    Attributes:
        dynamic_scale: the scale for the next step.
        finite: whether no gradient is inf or NaN. Applying only such gradients is left to you.
        aux: the loss, in float32 or wider, or the loss and what came with it.
        grad: the gradients, unscaled, in float32. Leaves in the collection `_overwrite_with_gradient` are next values,
            and as they left the backward pass.
    """

    dynamic_scale: "DynamicScale"
    finite: jax.Array
    aux: Any
    grad: Any


class DynamicScale(struct.PyTreeNode):
    """A loss scale that grows after a run of clean steps and backs off when a gradient is inf or NaN.

    Fixed here: under `jax.vmap`, the returned scale can be used for the next step; with `agree_axis`, devices that do
    not average their gradients agree; the loss is not divided back from a product that may be infinite; scales and amax
    histories of FP8 layers are neither divided nor checked; and a step with a default scale compiles once.

    Attributes:
        growth_factor: what the scale is multiplied by when it grows.
        backoff_factor: what the scale is multiplied by when it backs off.
        growth_interval: clean steps in a row before the next one grows the scale.
        fin_steps: clean steps in a row. A leaf.
        scale: what the loss is multiplied by. A leaf. As a vector, which is how `jax.vmap` returns it, it counts as
            the smallest of its numbers, and `fin_steps` likewise: one overflow lowers the scale of all.
        minimum_scale: the scale never falls below; None for no such bound.

    >>> dynamic_scale = DynamicScale(growth_interval=10)
    >>> dynamic_scale, finite, loss, grad = dynamic_scale.value_and_grad(lambda x: x * x)(3.0)
    >>> float(loss), float(grad), bool(finite), float(dynamic_scale.scale)
    (9.0, 6.0, True, 65536.0)
    """

    growth_factor: float = struct.field(pytree_node=False, default=2.0)
    backoff_factor: float = struct.field(pytree_node=False, default=0.5)
    growth_interval: int = struct.field(pytree_node=False, default=2000)
    # Arrays: a Python number that becomes an array after the first step compiles the step a second time.
    fin_steps: Any = struct.field(default_factory=lambda: jnp.int32(0))
    scale: Any = struct.field(default_factory=lambda: jnp.float32(65536))
    minimum_scale: float | None = struct.field(pytree_node=False, default=float(jnp.finfo(jnp.float32).tiny))

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: AxisNames = None,
        agree_axis: AxisNames = None,
    ) -> Callable[..., DynamicScaleResult]:
        """Returns a function of the arguments of `fun` that returns a `DynamicScaleResult`.

        Args:
            fun: returns a loss, a scalar; with `has_aux`, a loss and anything else.
            argnums: which arguments to differentiate by.
            has_aux: whether `fun` returns (loss, aux).
            axis_name: axes that the gradients are averaged over, which also makes all devices along them agree.
            agree_axis: axes along which the devices, or the rows of a `jax.vmap`, agree whether all of them are finite,
                while each keeps its own gradients.
        """
        scale = _smallest(self.scale, jnp.float32)
        means = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())

        @wraps(fun)
        def scaled(*args: Any) -> tuple[Any, Any]:
            returned = fun(*args)
            loss = returned[0] if has_aux else returned
            return scale * loss, returned

        differentiated = jax.value_and_grad(scaled, argnums, has_aux=True)

        def step(*args: Any) -> DynamicScaleResult:
            (scaled_loss, returned), grads = differentiated(*args)
            # The loss itself, from aux. flax divides the scaled loss by the scale, which is inf if the product was.
            loss, *others = returned if has_aux else (returned,)
            loss = jnp.asarray(loss, scaled_loss.dtype)
            # Divided in float32 before `pmean`, in flax's order: an FP16 sum of scaled gradients could overflow.
            parts = split(grads, "grads")
            trained = tuple(jnp.asarray(grad, jnp.float32) / scale for grad in parts.of(Leaf.TRAINED))
            gradients = Gradients(trained, parts.of(Leaf.OVERWRITTEN))
            gradients = Axes(means=means).averaged(gradients)
            finite = all_finite(gradients.trained)
            if agree_axis is not None:  # as integers: a flag has no minimum
                finite = lax.pmin(finite.astype(jnp.int32), agree_axis).astype(bool)
            grads = parts.filled(gradients)
            return DynamicScaleResult(self._after(finite), finite, (loss, *others) if has_aux else loss, grads)

        return step

    def _after(self, finite: jax.Array) -> "DynamicScale":
        """Returns the scale for the next step."""
        state = LadderState(scale=_smallest(self.scale, jnp.float32), clean_steps=_smallest(self.fin_steps, jnp.int32))
        after = self._rule().next(state, Seen(finite=finite), jnp)
        return self.replace(fin_steps=after.clean_steps, scale=after.scale)

    def _rule(self) -> Ladder:
        """Returns flax's rule. Raises if a setting is out of range."""
        return dynamic_scale(
            self.growth_factor, self.backoff_factor, self.growth_interval, minimum_scale=self.minimum_scale
        )


def _smallest(leaf: Any, dtype: Any) -> jax.Array:
    """Returns the smallest number of a leaf, as a scalar.

    Rows with the same initial scale and count that were updated independently give the state of a joint update this
    way: a row that overflowed has the lower scale, and the count 0.
    """
    return jnp.asarray(leaf, dtype).min()
