"""Room one, measure: a read of the gradients that says whether they are finite, how large, and which are not."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from gradscale.formats import FP32
from gradscale.jax.agree import summed, worst
from gradscale.jax.tree import real_parts, wide_type
from gradscale.policy import Policy
from gradscale.state import Seen


class Measured(NamedTuple):
    """What was found in the gradients, still scaled. A part that nobody asked for has no elements.

    Attributes:
        peaks: largest magnitude in each gradient; anything where it holds an inf or NaN.
        totals: sum of the magnitudes of each gradient, halved; inf or NaN where it holds one.
        squares: sum of the squares of each gradient; inf or NaN where it holds one.
        share: share of the elements above the edge that a policy watches, 0-d.
    """

    peaks: Array
    totals: Array
    squares: Array
    share: Array

    @property
    def sizes(self) -> Array:
        """One number per gradient, no less than half its largest magnitude; inf or NaN where the gradient holds one."""
        return self.totals if self.totals.size else jnp.sqrt(self.squares)

    @property
    def norm(self) -> Array:
        """Norm of all gradients together, scaled. Its derivative at zero is zero; that of a bare root is NaN."""
        total = jnp.sum(self.squares)
        return jnp.where(total == 0, 0.0, jnp.sqrt(jnp.where(total == 0, 1.0, total)))

    def finite(self, unit: Array) -> Array:
        """Returns whether every gradient is finite, now and once it is divided by `unit`."""
        return jnp.all(jnp.isfinite(self.sizes * (2.0 / unit)))

    def seen(self, unit: Array, loss_finite: Array) -> Seen:
        """Returns the facts that the decision is made from, in true units.

        Args:
            unit: the scale that made the gradients.
            loss_finite: whether the loss was finite, on every device.
        """
        unscale = 1.0 / unit
        finite = self.finite(unit)
        amax = jnp.minimum(jnp.max(self.peaks, initial=0.0) * unscale, FP32.max)
        return Seen(
            finite=finite,
            loss_finite=loss_finite,
            amax=jnp.where(finite, amax, FP32.max).astype(jnp.float32),
            norm=self.norm * unscale,
            upper_share=self.share,
        )


class Found(NamedTuple):
    """What one device found, as in `Measured`: lists with a number for each gradient, empty where nobody asked."""

    peaks: list[Array]
    totals: list[Array]
    squares: list[Array]
    share: Array


def measure(gradients: Sequence[Array], policy: Policy, *, norm: bool) -> Found:
    """Returns what this device finds in the gradients. Reads them once for each size that is needed.

    Whether all is finite comes with a sum, of squares where the norm is wanted and else of magnitudes, and costs no
    read of its own. It cannot come with the largest magnitude: XLA's kernel for the CPU loses a NaN in `max` from
    some 4,096 elements on. Finite gradients count as an overflow where the sum is one: from 1.8e19 on for squares.

    Args:
        gradients: floating-point or complex arrays.
        policy: says what it needs.
        norm: whether the norm is wanted.
    """
    edge: float = getattr(policy, "edge_magnitude", math.inf)
    return Found(
        peaks=[peak(gradient) for gradient in gradients] if "amax" in policy.needs else [],
        totals=[half_total(gradient) for gradient in gradients] if policy.needs and not norm else [],
        squares=[square(gradient) for gradient in gradients] if norm else [],
        share=share_above(gradients, edge) if "upper_share" in policy.needs else jnp.float32(0),
    )


def agreed(found: Found, loss_finite: Array, axes: Sequence[str]) -> tuple[Measured, Array]:
    """Returns what all devices together found, and whether the loss was finite on all of them.

    Two small all-reduces where parameters are spread over devices, one where they are not, none without axes.
    """
    lists = found.peaks, found.totals, summed(found.squares, axes)
    numbers = [*itertools.chain(*lists), found.share, (~loss_finite).astype(jnp.float32)]
    packed = worst(jnp.stack(jnp.broadcast_arrays(*numbers)), axes)
    ends = itertools.accumulate(map(len, lists))
    peaks, totals, squares = (packed[end - len(one) : end] for end, one in zip(ends, lists, strict=True))
    return Measured(peaks, totals, squares, packed[-2].astype(jnp.float32)), packed[-1] == 0


def peak(gradient: Array) -> Array:
    """Returns the largest magnitude; anything where there is a NaN."""
    parts = [jnp.max(jnp.abs(part), initial=0.0) for part in real_parts(gradient)]
    return jnp.max(jnp.stack(parts)).astype(_real_wide(gradient))


def half_total(gradient: Array) -> Array:
    """Returns half the sum of the magnitudes.

    Half, so that XLA does not write the magnitudes to memory to share them with `peak`: that takes four times as long.
    """
    wide = [part.astype(_real_wide(gradient)) for part in real_parts(gradient)]
    return jnp.sum(jnp.stack([jnp.sum(jnp.abs(part * 0.5)) for part in wide]))


def square(gradient: Array) -> Array:
    """Returns the sum of the squares."""
    wide = [part.astype(_real_wide(gradient)) for part in real_parts(gradient)]
    return jnp.sum(jnp.stack([jnp.sum(jnp.square(part)) for part in wide]))


def share_above(gradients: Sequence[Array], edge: float) -> Array:
    """Returns the share of all elements whose magnitude is above `edge`; inf and NaN are. Complex ones count as two."""
    parts = [part.astype(_real_wide(part)) for gradient in gradients for part in real_parts(gradient)]
    counts = [jnp.sum(~(jnp.abs(part) <= edge), dtype=jnp.uint32).astype(jnp.float32) for part in parts]
    return jnp.sum(jnp.stack([jnp.float32(0), *counts])) / max(1, sum(part.size for part in parts))


def _real_wide(gradient: Array) -> jnp.dtype:
    """Returns the type in which sizes of `gradient` are added up: float32, or float64 where it is."""
    return jnp.finfo(wide_type(gradient)).dtype
