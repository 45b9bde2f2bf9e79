"""What differs between versions of JAX, checked by feature: the axes that an array varies over, and those that exist.

Everything else in this package is the same for every version from `LOWEST` on.
"""

from typing import Any

import jax
import jax.core
from jax import Array, lax

LOWEST = "0.7.0"
"""The first version in which `zeros_like` keeps the varying axes of an array. Before, the moments that optax makes
under `shard_map` lose them, and JAX refuses the step."""

# By version, as nothing tells this one from the one before it without running a `shard_map`.
if jax.__version_info__ < tuple(map(int, LOWEST.split("."))):
    raise ImportError(
        f"gradscale.jax needs jax {LOWEST} or newer. Received: jax {jax.__version__}. "
        "Install a newer one: pip install -U 'gradscale[jax]'."
    )


def varying_axes(kind: Any) -> frozenset[str]:
    """Returns the varying axes of an array of the type `kind`; none with `check_vma=False`."""
    manual = getattr(kind, "manual_axis_type", None)  # from JAX 0.10
    return frozenset(manual.varying if manual is not None else getattr(kind, "vma", None) or ())


def vary(array: Array, axes: tuple[str, ...]) -> Array:
    """Returns `array` as one that varies over `axes`, over which it does not yet."""
    # `pvary` is the older name, up to JAX 0.9. Asking for it where both are gives a warning.
    return lax.pcast(array, axes, to="varying") if hasattr(lax, "pcast") else lax.pvary(array, axes)


def device_axes(averaged: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Returns the axes of `shard_map` and `pmap` that are mapped here, and none of `vmap` but those of `averaged`.

    Raises:
        ValueError: an axis is mapped that may be one of `pmap` or one of `vmap`. JAX before 0.8, and later ones with
            `jax_pmap_shmap_merge` switched off, do not tell which.
    """
    found = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    # Since JAX 0.8 `pmap` is a `shard_map`. Where the setting is gone, it cannot be anything else.
    if getattr(jax.config, "jax_pmap_shmap_merge", True):
        return tuple(dict.fromkeys((*found, *averaged)))
    others = [axis for axis in jax.core.unsafe_get_axis_names_DO_NOT_USE() if axis not in (*found, *averaged)]
    # An axis that the user gave no name is one of `pmap`: JAX makes up an object for it, which is no string.
    if unclear := [axis for axis in others if isinstance(axis, str)]:
        raise ValueError(
            f"`axis_names` must be given under `pmap` and `vmap(axis_name=...)` with jax {jax.__version__}, which does "
            f"not tell one from the other. Received: axis_names=None where {unclear} is mapped. Give the axes whose "
            "devices share the scale, or `()` for none. From jax 0.8 on, those of `pmap` are found."
        )
    return tuple(dict.fromkeys((*found, *averaged, *others)))
