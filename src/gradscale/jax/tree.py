"""Gradients and states as pytrees: which leaves have gradients, what they are called, and how to put them back."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gradscale.record import place

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Split:
    """A flattened pytree: the leaves that have gradients, and the rest.

    Attributes:
        differentiable: floating-point and complex leaves.
        names: what the differentiable leaves are called, as in `encoder.0.weight`.
        leaves: all leaves.
        structure: the structure of the pytree.
    """

    differentiable: tuple[Any, ...]
    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    structure: Any

    def filled(self, values: Sequence[Any]) -> Any:
        """Returns the pytree with `values` for its differentiable leaves, and everything else as it was."""
        given = iter(values)
        return self.structure.unflatten([next(given) if is_differentiable(leaf) else leaf for leaf in self.leaves])

    def gradients(self, values: Sequence[Any]) -> Any:
        """Returns the pytree with `values` for its differentiable leaves, and zeros for everything else."""
        # Not None, which changes the structure, nor float0, of which optax's adam cannot compute moments.
        given = iter(values)
        return self.structure.unflatten(
            [next(given) if is_differentiable(leaf) else _zero_gradient(leaf) for leaf in self.leaves]
        )


def split(tree: Any, what: str) -> Split:
    """Returns `tree` flattened. Errors call it `what`.

    Raises:
        TypeError: a leaf is neither an array nor a number.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in paths:
        _check_leaf(_name(path, what), leaf, what)
    differentiable = [(path, leaf) for path, leaf in paths if is_differentiable(leaf)]
    return Split(
        differentiable=tuple(leaf for _, leaf in differentiable),
        names=tuple(_name(path, what) for path, _ in differentiable),
        leaves=tuple(leaf for _, leaf in paths),
        structure=structure,
    )


def is_differentiable(leaf: Any) -> bool:
    """Returns whether `leaf` can have a gradient."""
    return jnp.issubdtype(_dtype(leaf), jnp.inexact)


def without_keys(tree: Any) -> Any:
    """Returns `tree` with zeros instead of random keys, on which an optimizer cannot compute."""
    return jax.tree.map(lambda leaf: _zero_gradient(leaf) if _is_key(leaf) else leaf, tree)


def as_pytree(record: R) -> R:
    """Returns a copy of `record` that is a pytree, with an array of its own in every field."""
    # Strongly typed arrays: a step returns these, and Python or numpy numbers at the first call would compile it a
    # second time. Not shared between fields: one zero in two counters cannot be donated twice.
    register(type(record))
    return place(record, jnp.array)


@functools.cache
def register(kind: type) -> None:
    """Registers a pytree node: every field of the dataclass `kind` holds arrays."""
    jax.tree_util.register_dataclass(kind, [field.name for field in fields(kind)], [])


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)


def _zero_gradient(leaf: Any) -> Any:
    """Returns a gradient of zero for a leaf that has none; int32 where an optimizer cannot compute with its type."""
    is_bare = _dtype(leaf) == jax.dtypes.float0  # what `jax.grad(allow_int=True)` gives
    return jnp.zeros(leaf.shape, jnp.int32) if is_bare or _is_key(leaf) else jnp.zeros_like(leaf)


def _is_key(leaf: Any) -> bool:
    """Returns whether `leaf` is a random key, or several."""
    return jnp.issubdtype(_dtype(leaf), jax.dtypes.extended)


def _check_leaf(name: str, leaf: Any, what: str) -> None:
    if not isinstance(leaf, int | float | complex | np.generic) and not hasattr(leaf, "dtype"):
        raise TypeError(
            f"Every leaf of {what} must be an array or a number. Received: {name!r} of type {type(leaf).__name__}. "
            "Remove it first, for example with `equinox.partition(model, equinox.is_inexact_array)`."
        )


def _name(path: Any, what: str) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or what
