"""Agree, the second stage: one measurement for all devices that share the scale."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from gradscale.engine.measurement import LARGEST_NORM, Measurement
from gradscale.engine.plan import Plan
from gradscale.jax.compat import device_axes, vary, varying_axes
from gradscale.jax.measure import LocalSizes
from gradscale.jax.tree import Gradients

AxisNames = str | Sequence[str] | None
"""Names of mapped axes; None means all axes of `shard_map` and `pmap`."""


def agree(local: LocalSizes, loss_finite: Array, plan: Plan, axes: Sequence[str]) -> tuple[Measurement, Array]:
    """Returns what all devices together measured, and whether the loss was finite on all of them.

    Two small all-reduces where parameters are sharded, one where they are not, none without axes.
    """
    # Packed into one vector: the latency of a collective does not depend on a few numbers more.
    shares = [] if local.upper_share is None else [local.upper_share]
    numbers = [*local.magnitudes, *_summed(local.squares, axes), *shares, (~loss_finite).astype(jnp.float32)]
    packed = _worst(jnp.stack(jnp.broadcast_arrays(*numbers)), axes)
    ends = list(itertools.accumulate(len(part) for part in (local.magnitudes, local.squares, shares)))
    magnitudes, squares, share, nonfinite_losses = jnp.split(packed, ends)
    measurement = _measurement(magnitudes, squares, plan)
    if shares:
        measurement = measurement._replace(upper_share=share[0].astype(jnp.float32))
    return measurement, nonfinite_losses[0] == 0


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
    norm = _root(jnp.sum(squares))
    return norm if norm.dtype == jnp.float32 else jnp.where(norm < LARGEST_NORM, norm, jnp.inf)


def _root(total: Array) -> Array:
    """Returns the square root, whose derivative at zero is zero here; that of `jnp.sqrt` is infinite."""
    return jnp.where(total == 0, 0.0, jnp.sqrt(jnp.where(total == 0, 1.0, total)))


def mapped_axes(axis_names: AxisNames, averaged: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Returns the axes to agree over.

    Under plain `jit` there are none, and none are needed: a sharded array is one array there. An axis of `vmap` is not
    found: by default its scales are independent, unless gradients are `averaged` over it.

    Raises:
        ValueError: an axis is not mapped here, or it cannot be told whether one is of devices.
    """
    # All of them by default: with `check_vma=False` and no agreement, the scales of devices would diverge silently.
    if axis_names is None:
        return device_axes(averaged)
    axes = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    for axis in axes:
        _check_mapped(axis)
    return axes


def zeros(kind: Any) -> Array:
    """Returns zeros of a type, with its sharding and its varying axes."""
    # A branch of `cond` and the carry of a loop must have the same varying axes as their counterpart. A constant has
    # none.
    plain = jnp.zeros_like(kind)
    axes = tuple(sorted(varying_axes(kind) - varying_axes(jax.typeof(plain))))
    return vary(plain, axes) if axes else plain


def averaged(gradients: Gradients, axes: str | Sequence[str]) -> Gradients:
    """Returns gradients averaged over `axes`: one all-reduce. Of next values, the largest."""
    # Scales and amax histories of FP8, of which flax takes the maximum too where a layer is used twice.
    overwrites = lax.pmax(gradients.overwrites, axes) if gradients.overwrites else ()
    return Gradients(lax.pmean(gradients.trained, axes), overwrites)


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


def _summed(squares: Sequence[Array], axes: Iterable[str]) -> list[Array]:
    """Returns each value summed over its varying axes.

    Those are the squares of gradients whose parameters are sharded. With `check_vma=False` and `pmap` JAX tracks no
    varying axes and nothing is summed: reduced gradients are the same on all devices there.
    """
    # One `psum` for each set of axes: stacked values share their varying axes, so others must not be among them.
    together = [tuple(sorted(varying_axes(jax.typeof(square)) & set(axes))) for square in squares]
    sums = list(squares)
    for names in sorted(set(together) - {()}):
        places = [place for place, own in enumerate(together) if own == names]
        for place, total in zip(places, lax.psum(jnp.stack([squares[place] for place in places]), names), strict=True):
            sums[place] = total
    return sums


def _check_mapped(axis: str) -> None:
    try:
        lax.axis_size(axis)
    except NameError as error:
        raise ValueError(
            "An axis must be mapped where the step runs, by `shard_map`, `pmap` or `vmap(axis_name=...)`. "
            f"Received: {axis!r}. Found here: {list(jax.sharding.get_abstract_mesh().manual_axes)}. "
            "Under plain `jit` none is needed."
        ) from error
