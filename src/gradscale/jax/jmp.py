"""Drop-ins for jmp: the same names, fields, leaves and rules, with its bugs fixed.

`min_loss_scale` survives `jax.jit` and every other transformation; jmp forgets it there, and it becomes 1. A scale in
FP16 works without a `min_loss_scale` in FP16. As in jmp, skipping a step is left to you; `gradscale.jax.value_and_grad`
and `gradscale.jax.apply` do all of it.
"""

import warnings
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gradscale.jax.casting import Policy, cast_to_full, cast_to_half, get_policy, half_dtype
from gradscale.peers.jmp import dynamic_loss_scale
from gradscale.peers.ladder import Ladder, LadderState
from gradscale.policies.contract import Seen, advanced

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "all_finite",
    "cast_to_full",
    "cast_to_half",
    "get_policy",
    "half_dtype",
    "select_tree",
]

T = TypeVar("T")


@jax.tree_util.register_static
@dataclass(frozen=True)
class NoOpLossScale:
    """Scales nothing. A pytree without leaves."""

    @property
    def loss_scale(self) -> int:
        """One."""
        return 1

    def scale(self, tree: T) -> T:
        """Returns `tree`."""
        return tree

    def unscale(self, tree: T) -> T:
        """Returns `tree`."""
        return tree

    def adjust(self, grads_finite: Any) -> "NoOpLossScale":
        """Returns itself."""
        del grads_finite
        return self


class _Scales:
    """Multiplies and divides pytrees by `loss_scale`."""

    loss_scale: Any

    def scale(self, tree: T) -> T:
        """Returns `tree` times the scale."""
        return _times(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Returns `tree` divided by the scale."""
        return _times(tree, 1 / self.loss_scale)


@jax.tree_util.register_static
@dataclass(frozen=True)
class StaticLossScale(_Scales):
    """Scales by a constant. A pytree without leaves: another constant compiles another program.

    Attributes:
        loss_scale: the constant: a number, or an array of one.
    """

    loss_scale: Any

    def adjust(self, grads_finite: Any) -> "StaticLossScale":
        """Returns itself."""
        del grads_finite
        return self


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class DynamicLossScale(_Scales):
    """Multiplies its scale by `factor` after `period` clean steps, and divides it by `factor` after any other.

    A growth to infinity is not taken, and a backoff ends at `min_loss_scale`. The scale stays between 2**-126 and
    2**126, as devices flush a reciprocal beyond them to zero, and with it every gradient. The leaves are `loss_scale`
    and `counter`; all else is static.

    Attributes:
        loss_scale: the scale. Its type is kept.
        counter: clean steps in a row.
        period: clean steps before the scale grows.
        factor: what it grows and backs off by.
        min_loss_scale: the scale never falls below.

    >>> loss_scale = DynamicLossScale(jnp.float32(2**15), min_loss_scale=2.0**14)
    >>> for _ in range(2):
    ...     loss_scale = jax.jit(DynamicLossScale.adjust)(loss_scale, all_finite(jnp.inf))
    ...     print(loss_scale.loss_scale)
    16384.0
    16384.0
    """

    loss_scale: Any
    counter: Any = field(default_factory=lambda: jnp.int32(0))
    period: int = 2000
    factor: float = 2
    min_loss_scale: Any = 1.0

    def __post_init__(self) -> None:
        for name in ("loss_scale", "min_loss_scale"):
            dtype = jnp.result_type(getattr(self, name))
            if not jnp.issubdtype(dtype, jnp.floating):
                warnings.warn(f"Expected floating type for {name}, got {dtype}", stacklevel=3)
        for name in ("period", "factor", "min_loss_scale"):
            object.__setattr__(self, name, _constant(name, getattr(self, name)))
        if isinstance(self.period, float) and self.period.is_integer():  # jmp takes 1000.0 too
            object.__setattr__(self, "period", int(self.period))
        self._rule()

    def adjust(self, grads_finite: Any) -> "DynamicLossScale":
        """Returns the scale for the next step. Does not synchronize with the device.

        Args:
            grads_finite: whether this step was clean, as `all_finite` returns it.
        """
        grads_finite = jnp.asarray(grads_finite)
        if grads_finite.ndim:
            raise AssertionError(f"Expected boolean scalar. Received: `grads_finite` of shape {grads_finite.shape}.")
        after = advanced(self._rule(), self._state(), Seen(finite=grads_finite), jnp)
        _, static = self.tree_flatten()
        return self.tree_unflatten(static, (after.scale, after.clean_steps))

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, float, float]]:
        """Returns the leaves, and what is static."""
        return (self.loss_scale, self.counter), (self.period, self.factor, self.min_loss_scale)

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, Any], tuple[int, float, float]]:
        """Returns the leaves with their names, and what is static."""
        (loss_scale, counter), static = self.tree_flatten()
        name = jax.tree_util.GetAttrKey
        return ((name("loss_scale"), loss_scale), (name("counter"), counter)), static

    @classmethod
    def tree_unflatten(cls, static: tuple[int, float, float], leaves: tuple[Any, Any]) -> "DynamicLossScale":
        """Returns the scale that was flattened."""
        # Past `__post_init__`: JAX unflattens with tracers, shapes and `object()` for leaves, which no check accepts.
        made = object.__new__(cls)
        for own, value in zip(fields(cls), (*leaves, *static), strict=True):
            object.__setattr__(made, own.name, value)
        return made

    def _rule(self) -> Ladder:
        """Returns jmp's rule. Raises if a setting is out of range."""
        return dynamic_loss_scale(1.0, period=self.period, factor=self.factor, min_loss_scale=self.min_loss_scale)

    def _state(self) -> LadderState:
        """Returns the leaves as a state of the rule."""
        # jmp grows at `counter == period - 1` and wraps by a modulo, so a counter past the period does not grow.
        counter = jnp.asarray(self.counter)
        return LadderState(
            scale=jnp.asarray(self.loss_scale, getattr(self.loss_scale, "dtype", jnp.float32)),
            clean_steps=jnp.where(counter < self.period, counter, (counter + 1) % self.period - 1),
        )


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale


def all_finite(tree: Any) -> jax.Array:
    """Returns whether no number in `tree` is inf or NaN, as a scalar on the device. Reads each array once."""
    numbers = [leaf for leaf in jax.tree_util.tree_leaves(tree) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    flags = [jnp.isfinite(number).all() for number in numbers]
    return jnp.stack(flags).all() if flags else jnp.array(True)


def select_tree(pred: Any, a: T, b: T) -> T:
    """Returns `a` where `pred` is true and `b` where it is not, array by array. Both must have the same types.

    Args:
        pred: a boolean scalar, such as `all_finite` returns.
        a: the pytree for True.
        b: the pytree for False.
    """
    if pred.ndim or pred.dtype != jnp.bool_:
        raise AssertionError(f"expected boolean scalar. Received: `pred` of shape {pred.shape} and type {pred.dtype}.")
    return jax.tree_util.tree_map(lambda x, y: jax.lax.select(pred, x, y), a, b)


def _times(tree: T, factor: Any) -> T:
    return jax.tree_util.tree_map(lambda leaf: leaf * factor, tree)


def _constant(name: str, value: Any) -> Any:
    """Returns a Python number: JAX compares and hashes the static part of a pytree."""
    if isinstance(value, Tracer):
        raise TypeError(
            f"`{name}` is static and must be a number or a concrete array. Received: {value}. "
            "Make the loss scale outside of `jax.jit`, and pass it in."
        )
    return np.asarray(value).item()
