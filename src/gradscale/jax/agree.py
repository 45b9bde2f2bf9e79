"""Agree, the second stage: one measurement for all devices that share the scale."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from gradscale.engine.measurement import LARGEST_NORM, Measurement
from gradscale.engine.plan import Plan
from gradscale.jax.axes import Axes, grouped, size
from gradscale.jax.compat import vary, varying_axes
from gradscale.jax.measure import LocalSizes


class Agreed(NamedTuple):
    """What all devices that share the scale know after they agreed.

    Attributes:
        measurement: what all of them together measured.
        loss_finite: whether the loss was finite on all of them.
        scale_range: their lowest and highest scale, or None where there is nothing to compare.
    """

    measurement: Measurement
    loss_finite: Array
    scale_range: Array | None

    @property
    def in_sync(self) -> Array | bool:
        """Whether all devices have the same scale."""
        return True if self.scale_range is None else self.scale_range[0] == self.scale_range[1]


def agree(local: LocalSizes, loss_finite: Array, scale: Array, plan: Plan, axes: Axes) -> Agreed:
    """Returns what all devices together measured, and whether their losses were finite and their scales the same.

    Two small all-reduces where parameters are sharded, one where they are not, none without axes.
    """
    local = _summed(local, axes)
    above = [jnp.float32(0), *local.above]
    shares = [] if plan.edge is None else [jnp.sum(jnp.stack(above)) / max(1, sum(local.elements))]
    # Compared in the all-reduce that is made anyway, as a maximum and a minimum; also where JAX's types say that all
    # devices have the same, since a process may have loaded another one. `NoScaling` has nothing to compare.
    compares = plan.checks and bool(axes.shared)
    scales = [scale, -scale] if compares else []
    # Packed into one vector: the latency of a collective does not depend on a few numbers more.
    parts = [local.magnitudes, local.squares, shares, scales, [(~loss_finite).astype(jnp.float32)]]
    packed = _worst(jnp.stack(jnp.broadcast_arrays(*itertools.chain(*parts))), axes.shared)
    ends = list(itertools.accumulate(map(len, parts)))[:-1]
    magnitudes, squares, share, highest, nonfinite_losses = jnp.split(packed, ends)
    measurement = _measurement(magnitudes, squares, plan)
    if shares:
        measurement = measurement._replace(upper_share=share[0].astype(jnp.float32))
    scale_range = jnp.stack([-highest[1], highest[0]]).astype(jnp.float32) if compares else None
    return Agreed(measurement, nonfinite_losses[0] == 0, scale_range)


def _measurement(magnitudes: Array, squares: Array, plan: Plan) -> Measurement:
    """Returns what the sizes of single gradients say of all of them."""
    # A norm stands in for the largest magnitude. Slightly more, so that rounding cannot make it less.
    sizes = magnitudes if magnitudes.size else jnp.sqrt(squares) * 1.0001
    # NaN becomes inf first: XLA's maximum may lose a NaN.
    largest = total = jnp.max(jnp.where(jnp.isfinite(sizes), sizes, jnp.inf), initial=0.0)
    if magnitudes.size and squares.size:
        # Squares that overflow would make the norm inf, and clipping by it would make all gradients zero.
        total = jnp.where(jnp.all(jnp.isfinite(squares)), largest, jnp.inf)
    return Measurement(
        sizes=sizes if sizes.size else None,
        total=total,
        amax=largest if plan.amax else None,
        norm=_norm(squares) if plan.norm else None,
    )


def _norm(squares: Array) -> Array:
    """Returns the norm; inf where its square does not fit float32, also of float64 gradients."""
    total = jnp.sum(squares)
    # The derivative at zero is zero here; that of `jnp.sqrt` is infinite.
    norm = jnp.where(total == 0, 0.0, jnp.sqrt(jnp.where(total == 0, 1.0, total)))
    return norm if norm.dtype == jnp.float32 else jnp.where(norm < LARGEST_NORM, norm, jnp.inf)


def zeros(kind: Any) -> Array:
    """Returns zeros of a type, with its sharding and its varying axes."""
    # A branch of `cond` and the carry of a loop must have the same varying axes as their counterpart. A constant has
    # none.
    plain = jnp.zeros_like(kind)
    axes = tuple(sorted(varying_axes(kind) - varying_axes(jax.typeof(plain))))
    return vary(plain, axes) if axes else plain


def anywhere(flag: Array, axes: Sequence[str]) -> Array:
    """Returns whether `flag` is set on any device: one small all-reduce, or nothing if there are no axes."""
    return lax.pmax(flag.astype(jnp.float32), tuple(axes)) > 0 if axes else flag


def _worst(values: Array, axes: Sequence[str]) -> Array:
    """Returns the largest of each value over all devices, NaN above all: one small all-reduce."""
    if not axes:
        return values
    # A maximum may lose a NaN, so NaN is sent as a number of its own.
    is_nan = jnp.isnan(values)
    packed = lax.pmax(jnp.stack([jnp.where(is_nan, jnp.inf, values), is_nan.astype(values.dtype)]), tuple(axes))
    return jnp.where(packed[1] > 0, jnp.nan, packed[0])


def _summed(local: LocalSizes, axes: Axes) -> LocalSizes:
    """Returns squares and counts of each gradient, summed over the axes over which its parameter is sharded."""
    # One `psum` for each set of axes: stacked values share their varying axes, so others must not be among them.
    together = [
        axes.distinct(place, value) for part in (local.squares, local.above) for place, value in enumerate(part)
    ]
    values = grouped(
        lambda own, names: lax.psum(jnp.stack(own), names) if names else own, [*local.squares, *local.above], together
    )
    elements = [
        count * size(axes.distinct(place, value))
        for place, (count, value) in enumerate(zip(local.elements, local.above, strict=True))
    ]
    return local._replace(squares=values[: len(local.squares)], above=values[len(local.squares) :], elements=elements)
