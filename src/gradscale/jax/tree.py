"""Gradients and states as pytrees: what the gradient of each leaf means, what it is called, and how to put it back."""

import enum
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradscale.record import place

R = TypeVar("R")

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
"""Name of the collection in which flax keeps the scales and amax histories of its FP8 layers (`flax.linen.fp8_ops`)."""


class Leaf(enum.Enum):
    """What the gradient of a leaf means."""

    TRAINED = enum.auto()  # floating-point or complex: its gradient is a gradient, and scaled
    OVERWRITTEN = enum.auto()  # of flax's collection: its gradient is its next value, and not scaled
    CONSTANT = enum.auto()  # an integer, a flag or a random key: its gradient is zero
    STATIC = enum.auto()  # no array, such as an activation function: it has none


class Gradients(NamedTuple):
    """What a backward pass makes.

    Attributes:
        trained: gradients, in the order of the trained leaves.
        overwrites: next values of the leaves that are overwritten with their gradient, in their order.
    """

    trained: tuple[Array, ...]
    overwrites: tuple[Array, ...] = ()


@dataclass(frozen=True, slots=True)
class Split:
    """A flattened pytree.

    Attributes:
        leaves: all leaves.
        kinds: what the gradient of each means.
        names: what the trained leaves are called, as in `encoder.0.weight`.
        structure: the structure of the pytree.
    """

    leaves: tuple[Any, ...]
    kinds: tuple[Leaf, ...]
    names: tuple[str, ...]
    structure: Any

    @property
    def differentiable(self) -> Gradients:
        """The leaves that a backward pass has an answer for."""
        return Gradients(self.of(Leaf.TRAINED), self.of(Leaf.OVERWRITTEN))

    def of(self, kind: Leaf) -> tuple[Any, ...]:
        """Returns the leaves of one kind."""
        return tuple(leaf for leaf, own in zip(self.leaves, self.kinds, strict=True) if own is kind)

    def filled(self, values: Gradients) -> Any:
        """Returns the pytree with `values` for its differentiable leaves, and everything else as it was."""
        return self._with(values, lambda leaf, _: leaf)

    def gradients(self, values: Gradients) -> Any:
        """Returns the pytree with `values` for its differentiable leaves, zeros for constants and None for the rest."""
        # Not None for constants too, which changes the structure, nor float0, of which optax's adam cannot compute
        # moments. A leaf that is no array can have no zero: equinox gives None as well.
        return self._with(values, lambda leaf, kind: None if kind is Leaf.STATIC else _zero_gradient(leaf))

    def trainable(self, values: Sequence[Any]) -> Any:
        """Returns the pytree with `values` for its trained leaves, as an optimizer can compute with it.

        Zeros for leaves that are overwritten and for random keys, None for what is no array.
        """
        zeros = tuple(map(_zero_gradient, self.of(Leaf.OVERWRITTEN)))

        def other(leaf: Any, kind: Leaf) -> Any:
            if kind is Leaf.STATIC:
                return None
            return _zero_gradient(leaf) if _is_extended(leaf) else leaf

        return self._with(Gradients(tuple(values), zeros), other)

    def _with(self, values: Gradients, other: Callable[[Any, Leaf], Any]) -> Any:
        given = {Leaf.TRAINED: iter(values.trained), Leaf.OVERWRITTEN: iter(values.overwrites)}
        pairs = zip(self.leaves, self.kinds, strict=True)
        return self.structure.unflatten(
            [next(given[kind]) if kind in given else other(leaf, kind) for leaf, kind in pairs]
        )


def split(tree: Any, what: str) -> Split:
    """Returns `tree` flattened. A leaf that is the whole tree is called `what`.

    What is no array is static. Python numbers are parameters, as for `jax.grad`, except in a module of equinox, which
    keeps settings as leaves: the rate of a dropout would be trained.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    numbers = not _has_equinox_module(tree)
    kinds = [_kind(path, leaf, numbers) for path, leaf in paths]
    return Split(
        leaves=tuple(leaf for _, leaf in paths),
        kinds=tuple(kinds),
        names=tuple(
            path_name(path) or what for (path, _), kind in zip(paths, kinds, strict=True) if kind is Leaf.TRAINED
        ),
        structure=structure,
    )


def path_name(path: Any) -> str:
    """Returns the path of a leaf as in `encoder.0.weight`; nothing for a leaf that is the whole tree."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_inexact(leaf: Any) -> bool:
    """Returns whether `leaf` is of floating-point or complex numbers."""
    return jnp.issubdtype(_dtype(leaf), jnp.inexact)


def holds(kind: type, tree: Any) -> bool:
    """Returns whether there is a node of the class `kind` anywhere in `tree`."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return any(isinstance(node, kind) for node in nodes)


def is_inside(path: Any, *collections: str) -> bool:
    """Returns whether a path of a leaf goes through one of flax's collections of these names."""
    return any(getattr(entry, "key", None) in collections for entry in path)


def is_nnx_object(node: Any) -> bool:
    """Returns whether `node` is an object of flax nnx that may change in a call: a module, or `Rngs`."""
    # Not imported for this check: without flax loaded there can be no such object.
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Pytree)


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


def _kind(path: Any, leaf: Any, numbers: bool) -> Leaf:
    """Returns what the gradient of a leaf means. With `numbers`, Python numbers count as arrays."""
    if not hasattr(leaf, "dtype") and not (numbers and isinstance(leaf, int | float | complex)):
        return Leaf.STATIC
    overwritten = is_inside(path, OVERWRITE_WITH_GRADIENT)
    # flax has a type of its own for these leaves, of which backward passes take the maximum instead of the sum.
    is_key = jnp.issubdtype(_dtype(leaf), jax.dtypes.prng_key)
    if overwritten and not is_key and (is_inexact(leaf) or _is_extended(leaf)):
        return Leaf.OVERWRITTEN
    return Leaf.TRAINED if is_inexact(leaf) else Leaf.CONSTANT


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)


def _zero_gradient(leaf: Any) -> Any:
    """Returns a gradient of zero for a leaf that has none; int32 where an optimizer cannot compute with its type."""
    is_bare = _dtype(leaf) == jax.dtypes.float0  # what `jax.grad(allow_int=True)` gives
    return jnp.zeros(leaf.shape, jnp.int32) if is_bare or _is_extended(leaf) else jnp.zeros_like(leaf)


def _is_extended(leaf: Any) -> bool:
    """Returns whether `leaf` is of a type that JAX does not compute with, such as random keys."""
    return jnp.issubdtype(_dtype(leaf), jax.dtypes.extended)


def _has_equinox_module(tree: Any) -> bool:
    """Returns whether `tree` is or holds a module of equinox."""
    # Not imported for this check: without equinox loaded there can be no such module.
    equinox: Any = sys.modules.get("equinox")
    return equinox is not None and holds(equinox.Module, tree)
