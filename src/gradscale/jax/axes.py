"""The mapped axes of a step: which devices share the scale, and over which axes each parameter is sharded."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec

from gradscale.jax.compat import device_axes, varying_axes
from gradscale.jax.tree import Gradients, Leaf, Split

AxisNames = str | Sequence[str] | None
"""Names of mapped axes; None means all axes of `shard_map` and `pmap`."""

Names = frozenset[str]

K = TypeVar("K", Names, tuple[str, ...])


@dataclass(frozen=True, slots=True)
class Axes:
    """The mapped axes of a step. Under plain `jit` there are none: a sharded array is one array there.

    Attributes:
        shared: axes whose devices share the scale.
        means: axes to average the gradients over.
        untracked: those of both for which JAX does not say whether an array varies over them: the axes of `pmap`, of
            `vmap`, and of `shard_map` with `check_vma=False`.
        trained: for each trained leaf, the untracked axes over which it is sharded.
        overwritten: the same for each leaf that is overwritten with its gradient.
    """

    shared: tuple[str, ...] = ()
    means: tuple[str, ...] = ()
    untracked: Names = frozenset()
    trained: tuple[Names, ...] = ()
    overwritten: tuple[Names, ...] = ()

    @classmethod
    def of(cls, axis_names: AxisNames, mean_axes: AxisNames, specs: Any, params: Split, *, sums: bool) -> Self:
        """Returns the axes for the caller's arguments. Call it where the step is traced: axes are known only there.

        Raises:
            TypeError: `specs` holds something else than a `PartitionSpec`.
            ValueError: an axis is not mapped here; it cannot be told whether one is of devices; gradients that JAX
                reduces itself are to be averaged; `specs` has another structure than the parameters; or something
                `sums` over all gradients, as a norm does, where nothing says over which axes they are sharded.
        """
        means = mapped_axes(() if mean_axes is None else mean_axes)
        shared = mapped_axes(axis_names, means)
        # The index along an axis varies over it wherever JAX knows of such a thing. Traced, not run.
        varying = {axis: varying_axes(jax.eval_shape(partial(lax.axis_index, axis))) for axis in {*shared, *means}}
        untracked = frozenset(axis for axis, names in varying.items() if axis not in names)
        if tracked := sorted(set(means) - untracked):
            # Not only where JAX has summed: of a sharded parameter, each device would get the mean of all shards.
            raise ValueError(
                "`mean_axes` is for `pmap` and for `shard_map` with `check_vma=False`, where each device has gradients "
                f"of its own. Here JAX sums them over {tracked} itself. Take the mean of the loss inside "
                "`fun` instead, with `jax.lax.pmean`."
            )
        if sums and specs is None and (unclear := sorted(map(str, untracked - set(means)))):
            raise ValueError(
                "`clip_norm`, `norm` and `Histogram` need `specs` under `pmap`, with `check_vma=False` and along an "
                "axis of `vmap`, where JAX does not say over which axes parameters are sharded: they sum over all of "
                "them. "
                f"Received: specs=None where {unclear} is mapped. Give the `PartitionSpec` of each parameter, as in "
                "`in_specs`, or `specs=PartitionSpec()` if they, and their gradients, are the same on all devices."
            )
        known = [names & untracked for names in _sharded(specs, params)]
        pairs = list(zip(known, params.kinds, strict=True))
        trained, overwritten = (
            tuple(names for names, kind in pairs if kind is wanted) for wanted in (Leaf.TRAINED, Leaf.OVERWRITTEN)
        )
        return cls(shared, means, untracked, trained, overwritten)

    def check_scale(self, scale: Array, arrays: Iterable[Any]) -> None:
        """Raises if JAX's types show that the scale differs between devices that share it, a loss or a gradient.

        Where they do not show it, the devices compare their scales in the step.
        """
        own = varying_axes(jax.typeof(scale))
        common = [own - varying_axes(jax.typeof(array)) for array in arrays]
        if parted := sorted((own & set(self.shared)).union(*common)):
            raise ValueError(
                "A scale must be the same on all devices that share it, or share a loss or a gradient. Received: one "
                f"that varies over {parted}. Pass the scaler into `shard_map` with the spec `PartitionSpec()`."
            )

    def distinct(self, place: int, value: Array) -> tuple[str, ...]:
        """Returns the axes over which the gradient at `place`, of which `value` was measured, is sharded."""
        known = self.trained[place] if self.trained else frozenset()
        return tuple(sorted((varying_axes(jax.typeof(value)) | known) & set(self.shared)))

    def averaged(self, gradients: Gradients) -> Gradients:
        """Returns the gradients of the mean of all devices' losses: one all-reduce. Of next values, the largest.

        Of a sharded parameter, a device has the sum of what all losses contribute, as the backward pass of a collective
        is one. It is divided by their number, and not mixed with the other shards.
        """
        if not self.means:
            return gradients
        # Scales and amax histories of FP8, of which flax takes the maximum too where a layer is used twice.
        none = frozenset[str]()
        return Gradients(
            tuple(grouped(self._mean, gradients.trained, self.trained or [none] * len(gradients.trained))),
            tuple(grouped(self._largest, gradients.overwrites, self.overwritten or [none] * len(gradients.overwrites))),
        )

    def _mean(self, values: list[Array], sharded: Names) -> list[Array]:
        others = tuple(axis for axis in self.means if axis not in sharded)
        means = lax.pmean(values, others) if others else values
        losses = size(axis for axis in self.means if axis in sharded)
        return [mean / losses for mean in means] if losses > 1 else means

    def _largest(self, values: list[Array], sharded: Names) -> list[Array]:
        others = tuple(axis for axis in self.means if axis not in sharded)
        return lax.pmax(values, others) if others else values


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


def size(axes: Iterable[str]) -> int:
    """Returns the number of devices, or rows, along all of `axes` together."""
    return math.prod(lax.axis_size(axis) for axis in axes)


def grouped(reduce: Callable[[list[Array], K], Any], values: Sequence[Array], keys: Sequence[K]) -> list[Array]:
    """Returns all values reduced, those of one key in one call: one all-reduce for each."""
    reduced = list(values)
    for key in sorted(set(keys), key=sorted):
        places = [place for place, own in enumerate(keys) if own == key]
        for place, value in zip(places, reduce([values[place] for place in places], key), strict=True):
            reduced[place] = value
    return reduced


def _sharded(specs: Any, params: Split) -> list[Names]:
    """Returns the axes that `specs`, a prefix of the pytree of parameters, names for each leaf."""
    if specs is None:
        return [frozenset()] * len(params.leaves)
    for spec in jax.tree.leaves(specs, is_leaf=_is_spec):
        if not _is_spec(spec):
            raise TypeError(f"`specs` must hold a `PartitionSpec` for each parameter. Received: {spec!r}.")
        for axis in _named(spec):
            _check_mapped(axis)
    found: list[Names] = []
    try:
        jax.tree.map(
            lambda spec, part: found.extend([_named(spec)] * len(jax.tree.leaves(part))),
            specs,
            params.structure.unflatten(range(len(params.leaves))),
            is_leaf=_is_spec,
        )
    except ValueError as error:
        raise ValueError(
            "`specs` must be one `PartitionSpec`, or a pytree of them that is a prefix of that of the parameters. "
            f"Received: {jax.tree.structure(specs, is_leaf=_is_spec)} for parameters {params.structure}."
        ) from error
    return found


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _named(spec: PartitionSpec) -> Names:
    """Returns the names in a spec, whose entries are a name, several, or none."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in tuple(spec)]
    return frozenset(axis for entry in entries for axis in entry if isinstance(axis, str))


def _check_mapped(axis: str) -> None:
    try:
        lax.axis_size(axis)
    except NameError as error:
        raise ValueError(
            "An axis must be mapped where the step runs, by `shard_map`, `pmap` or `vmap(axis_name=...)`. "
            f"Received: {axis!r}. Found here: {list(jax.sharding.get_abstract_mesh().manual_axes)}. "
            "Under plain `jit` none is needed."
        ) from error
