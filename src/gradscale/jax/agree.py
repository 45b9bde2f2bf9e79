"""Room two, agree: makes what was seen the same on every device that shares the scale."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

AxisNames = str | Sequence[str] | None
"""Names of mapped axes; None stands for those of `shard_map` and `pmap`, which JAX knows."""


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


def worst(values: Array, axes: Sequence[str]) -> Array:
    """Returns the largest of each value over all devices, NaN above all: one small all-reduce.

    A maximum need not carry a NaN along, so that NaN travels as a number of its own.
    """
    if not axes:
        return values
    is_nan = jnp.isnan(values)
    packed = lax.pmax(jnp.stack([jnp.where(is_nan, jnp.inf, values), is_nan.astype(values.dtype)]), tuple(axes))
    return jnp.where(packed[1] > 0, jnp.nan, packed[0])


def summed(squares: Sequence[Array], axes: Iterable[str]) -> list[Array]:
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
