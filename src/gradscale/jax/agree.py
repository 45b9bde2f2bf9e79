"""Agree, the second stage: what was measured becomes the same on every device that shares the scale."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from gradscale.engine.measurement import Measurement
from gradscale.engine.plan import Plan
from gradscale.jax.measure import LocalSizes

AxisNames = str | Sequence[str] | None
"""Names of mapped axes; None stands for those of `shard_map` and `pmap`, which JAX knows."""


def agree(local: LocalSizes, loss_finite: Array, plan: Plan, axes: Sequence[str]) -> tuple[Measurement, Array]:
    """Returns what all devices together measured, and whether the loss was finite on all of them.

    Two small all-reduces where parameters are spread over devices, one where they are not, none without axes.

    Args:
        local: what this device measured.
        loss_finite: whether the loss was finite on this device.
        plan: what was read.
        axes: the mapped axes to agree over.
    """
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
    # From a root, a little more, so that its rounding cannot make it less than the largest magnitude.
    sizes = magnitudes if magnitudes.size else jnp.sqrt(squares) * 1.0001
    # Without NaN, which XLA's maximum may lose.
    largest = total = jnp.max(jnp.where(jnp.isfinite(sizes), sizes, jnp.inf), initial=0.0)
    if magnitudes.size and squares.size:
        # Squares that overflow would make the norm inf, and clipping by it would make all gradients zero.
        total = jnp.where(jnp.all(jnp.isfinite(squares)), largest, jnp.inf)
    return Measurement(
        sizes=sizes if sizes.size else None,
        total=total,
        amax=largest if plan.amax else None,
        norm=_root(jnp.sum(squares)) if plan.norm else None,
    )


def _root(total: Array) -> Array:
    """Returns the square root, whose derivative at zero is zero here; that of `jnp.sqrt` is infinite."""
    return jnp.where(total == 0, 0.0, jnp.sqrt(jnp.where(total == 0, 1.0, total)))


def mapped_axes(axis_names: AxisNames) -> tuple[str, ...]:
    """Returns the axes to agree over.

    Under plain `jit` there are none, and none are needed: arrays that are spread over devices are one array there.
    An axis of `vmap` is not found: by default its scales are independent.

    Raises:
        ValueError: an axis is not mapped here.
    """
    found = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if axis_names is None:
        return found
    axes = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    for axis in axes:
        _check_mapped(axis, found)
    return axes


def varying_axes(kind: Any) -> frozenset[str]:
    """Returns the axes along which JAX knows an array of the type `kind` to differ: none with `check_vma=False`."""
    manual = getattr(kind, "manual_axis_type", None)
    return frozenset() if manual is None else frozenset(manual.varying)


def zeros(kind: Any) -> Array:
    """Returns zeros of a type, spread over devices and different along mapped axes alike, as far as JAX knows."""
    plain = jnp.zeros_like(kind)
    axes = tuple(sorted(varying_axes(kind) - varying_axes(jax.typeof(plain))))
    return lax.pcast(plain, axes, to="varying") if axes else plain


def anywhere(flag: Array, axes: Sequence[str]) -> Array:
    """Returns whether `flag` is set on any device: one small all-reduce, or nothing if there are no axes."""
    return lax.pmax(flag.astype(jnp.float32), tuple(axes)) > 0 if axes else flag


def _worst(values: Array, axes: Sequence[str]) -> Array:
    """Returns the largest of each value over all devices, NaN above all: one small all-reduce.

    A maximum need not carry a NaN along, so that NaN travels as a number of its own.
    """
    if not axes:
        return values
    is_nan = jnp.isnan(values)
    packed = lax.pmax(jnp.stack([jnp.where(is_nan, jnp.inf, values), is_nan.astype(values.dtype)]), tuple(axes))
    return jnp.where(packed[1] > 0, jnp.nan, packed[0])


def _summed(squares: Sequence[Array], axes: Iterable[str]) -> list[Array]:
    """Returns each value added up over the axes along which it differs, as JAX knows it.

    Those are the squares of gradients whose parameters are spread over devices. Where JAX does not know, as with
    `check_vma=False` and `pmap`, nothing is added up: gradients are the same on all devices there, once reduced.
    """
    together = [tuple(sorted(varying_axes(jax.typeof(square)) & set(axes))) for square in squares]
    sums = list(squares)
    for names in sorted(set(together) - {()}):
        places = [place for place, own in enumerate(together) if own == names]
        for place, total in zip(places, lax.psum(jnp.stack([squares[place] for place in places]), names), strict=True):
            sums[place] = total
    return sums


def _check_mapped(axis: str, found: tuple[str, ...]) -> None:
    try:
        lax.axis_size(axis)
    except NameError as error:
        raise ValueError(
            "An axis must be mapped where the step runs, by `shard_map`, `pmap` or `vmap(axis_name=...)`. "
            f"Received: {axis!r}. Found here: {list(found)}. Under plain `jit` none is needed."
        ) from error
