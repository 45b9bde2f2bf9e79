"""`Watch`: what arrays of a model look like at sampled steps, counted inside of a compiled step or outside."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import GetAttrKey, SequenceKey

from gradscale.formats import Format
from gradscale.histogram.counts import ExponentHistogram
from gradscale.jax.tree import Leaf, is_inexact, path_name, split
from gradscale.kernels.jax_exponents import counts_and_peaks
from gradscale.watching.record import FORMATS, Ranges, WatchRecord
from gradscale.watching.rows import MODEL, Key, Kind, Tally, sample_of

GRADIENTS: tuple[Kind, ...] = ("output_grad", "weight_grad")


@dataclass(frozen=True, slots=True)
class WatchCounts:
    """What `Watch.count` returns. A pytree: return it from a compiled step, and give it to `Watch.step`.

    Attributes:
        bins: elements of each array in each bin of `gradscale.histogram.EXPONENTS`.
        outside: elements of each array that are zero, inf and NaN.
        amax: the largest magnitude of each array; NaN where it has one.
        scale: the scale of the loss.
        keys: name and kind of each array. Static.
        dtypes: type of each array. Static.
    """

    bins: Array
    outside: Array
    amax: Array
    scale: Array
    keys: tuple[Key, ...]
    dtypes: tuple[str, ...]


jax.tree_util.register_dataclass(WatchCounts, ["bins", "outside", "amax", "scale"], ["keys", "dtypes"])


class Watch(WatchRecord):
    """Counts parameters, activations and gradients at each `every`-th step, and keeps the record.

        watched = Watch(every=100)

        @partial(jax.jit, static_argnames="sampled")
        def step(scaler, params, batch, sampled):
            loss, grads, scaler, result = value_and_grad(loss_fn)(scaler, params, batch)
            counts = watched.count(weights=params, weight_grads=grads, scale=result.scale) if sampled else None
            ...
            return scaler, params, counts

        for batch in batches:
            scaler, params, counts = step(scaler, params, batch, sampled=watched.sampled)
            watched.step(counts)
        print(watched.table())

    As `sampled` is static, JAX compiles the step twice, and the program for the steps between samples counts nothing.

    >>> watched = Watch(every=2)
    >>> for x in (0.5, 1.0, 4.0):
    ...     watched.step(watched.count(weights={"w": jnp.full(3, x)}) if watched.sampled else None)
    >>> [(row.step, row.name, row.kind, row.amax) for row in watched.rows()]
    [(0, 'w', 'weight', 0.5), (2, 'w', 'weight', 4.0)]
    """

    def __init__(
        self,
        layers: str = "",
        every: int = 100,
        steps: Ranges | None = None,
        *,
        formats: Sequence[Format | str] = FORMATS,
    ) -> None:
        """Makes a record without samples.

        Args:
            layers: a regular expression; arrays in whose name it is found are counted. By default all.
            every: steps from one sample to the next, from step 0 on.
            steps: pairs of the first step and the one after the last; only steps in one of them are sampled.
            formats: what rows have losses of.

        Raises:
            ValueError: a format is not known, there is none, or `every` or `steps` are not numbers of steps.
        """
        super().__init__(every, steps, formats)
        self._layers = re.compile(layers)

    def count(
        self,
        *,
        weights: Any = None,
        inputs: Any = None,
        outputs: Any = None,
        output_grads: Any = None,
        weight_grads: Any = None,
        scale: Any = 1.0,
    ) -> WatchCounts:
        """Returns the counts of the floating-point arrays in pytrees. A pure function, for compiled steps too.

        Arrays are named by their paths. Those of `inputs`, `outputs` and `output_grads` that belong to one module, as
        in flax's collection `intermediates`, are counted together under its name. Leaves that are no parameters, such
        as integers and flax's FP8 statistics, are left out. Inside of a `shard_map` only the shard of a device is
        counted.

        Args:
            weights: parameters.
            inputs: what modules were called with.
            outputs: what modules returned.
            output_grads: unscaled gradients of those, such as flax's collection `perturbations` has.
            weight_grads: unscaled gradients of parameters. `value_and_grad` returns zeros for a step that is skipped,
                and clipped ones with `clip_norm`.
            scale: what the loss was multiplied by, `result.scale`. It does not change the gradients, only what formats
                lose of them.

        Raises:
            ValueError: `layers` is found in no name.
        """
        found = [
            *_named(weights, "weight"),
            *_named(inputs, "input"),
            *_named(outputs, "output"),
            *_named(output_grads, "output_grad"),
            *_named(weight_grads, "weight_grad"),
        ]
        chosen = [(key, array) for key, array in found if self._layers.search(key[0])]
        if not chosen:
            raise ValueError(
                f"`layers` must be found in the name of an array. Received: layers={self._layers.pattern!r}, and "
                f"{len(found)} arrays{f', the first of which is {found[0][0][0]!r}' if found else ''}."
            )
        arrays = tuple(array for _, array in chosen)
        keys, dtypes = tuple(key for key, _ in chosen), tuple(str(array.dtype) for array in arrays)
        bins, outside, amax = counts_and_peaks(arrays)
        return WatchCounts(bins, outside, amax, jnp.asarray(scale, jnp.float32), keys, dtypes)

    def step(self, counts: WatchCounts | None = None) -> None:
        """Notes the end of a step, and keeps its counts if it is sampled. Call it once after each step.

        Synchronizes with the device at sampled steps only.

        Raises:
            ValueError: the step is sampled and there are no counts, or they are those of several steps.
        """
        if self.sampled:
            if counts is None:
                raise ValueError(
                    f"Step {self.step_index} is sampled. Received: no counts. Pass what `count` returned wherever "
                    "`watched.sampled` holds: `sampled` must be read anew for each step."
                )
            read = jax.device_get(counts)
            if read.bins.ndim != 2:
                raise ValueError(
                    f"Counts must be those of one step. Received: some stacked in the shape {read.bins.shape[:-2]}, by "
                    "`scan`, `vmap` or `pmap`. Take one: `jax.tree.map(lambda leaf: leaf[0], counts)`."
                )
            bins, outside = (np.asarray(each, np.int64) for each in (read.bins, read.outside))
            histograms = (ExponentHistogram(*each) for each in zip(bins, *outside.T, strict=True))
            scales = (float(read.scale) if kind in GRADIENTS else 1.0 for _, kind in counts.keys)
            tallies = map(Tally, histograms, read.amax.tolist(), counts.dtypes, scales)
            self._samples[self.step_index] = sample_of(zip(counts.keys, tallies, strict=True))
        self.step_index += 1


def _named(tree: Any, kind: Kind) -> Iterator[tuple[Key, Array]]:
    """Yields the floating-point arrays of a pytree with their names."""
    if kind in ("weight", "weight_grad"):
        parts = split(tree, MODEL)
        for name, leaf in zip(parts.names, parts.of(Leaf.TRAINED), strict=True):
            yield (name, kind), jnp.asarray(leaf)
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if hasattr(leaf, "dtype") and is_inexact(leaf):
            yield (_module_name(path), kind), jnp.asarray(leaf)


def _module_name(path: Sequence[Any]) -> str:
    """Returns the name of the module whose activation is found at a path.

    flax stores a tuple for each module, with an item for each call, under the name of the method; nnx in a variable.

    >>> _module_name(jax.tree_util.tree_leaves_with_path({"Dense_0": {"__call__": (1.0,)}})[0][0])
    'Dense_0'
    """
    last = len(path)
    while last > 1 and (isinstance(path[last - 1], SequenceKey) or path[last - 1] == GetAttrKey("value")):
        last -= 1
    if last and getattr(path[last - 1], "key", None) == "__call__":
        last -= 1
    return path_name(path[:last]) or MODEL
