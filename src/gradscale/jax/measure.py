"""Room one, measure: a read of the gradients that says whether they are finite, how large, and which are not."""

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
        peaks: largest magnitude in each gradient; inf or NaN where it holds one.
        squares: sum of the squares of each gradient.
        share: share of the elements above the edge that a policy watches, 0-d.
    """

    peaks: Array
    squares: Array
    share: Array

    @property
    def sizes(self) -> Array:
        """One number per gradient, its largest magnitude or its norm; not finite where the gradient is not."""
        return self.peaks if self.peaks.size else jnp.sqrt(self.squares)

    @property
    def norm(self) -> Array:
        """Norm of all gradients together, scaled."""
        return jnp.sqrt(jnp.sum(self.squares))

    def finite(self, unit: Array) -> Array:
        """Returns whether every gradient is finite, now and once it is divided by `unit`."""
        return jnp.all(jnp.isfinite(self.sizes * (1.0 / unit)))

    def seen(self, unit: Array, loss_finite: Array) -> Seen:
        """Returns the facts that the decision is made from, in true units.

        Args:
            unit: the scale that made the gradients.
            loss_finite: whether the loss was finite, on every device.
        """
        unscale = 1.0 / unit
        peak = jnp.max(self.peaks, initial=0.0) * unscale
        return Seen(
            finite=self.finite(unit),
            loss_finite=loss_finite,
            amax=jnp.minimum(peak, FP32.max).astype(jnp.float32),
            norm=self.norm * unscale,
            upper_share=self.share,
        )


def measure(gradients: Sequence[Array], policy: Policy, *, norm: bool) -> tuple[list[Array], list[Array], Array]:
    """Returns peaks, squares and share, as in `Measured`, on this device. Reads every gradient once for each it needs.

    Whether all is finite comes with either size, so it costs no read of its own. It is told from the squares only
    where nothing else is read: those of a finite float32 gradient above 1.8e19 are not.

    Args:
        gradients: floating-point or complex arrays.
        policy: says what it needs.
        norm: whether the norm is wanted.
    """
    wants_peaks = "amax" in policy.needs or ("finite" in policy.needs and not norm)
    peaks = [_peak(gradient) for gradient in gradients] if wants_peaks else []
    squares = [_square(gradient) for gradient in gradients] if norm else []
    edge: float = getattr(policy, "edge_magnitude", math.inf)
    return peaks, squares, _share_above(gradients, edge) if "upper_share" in policy.needs else jnp.float32(0)


def agreed(
    found: tuple[list[Array], list[Array], Array], loss_finite: Array, axes: Sequence[str]
) -> tuple[Measured, Array]:
    """Returns what all devices together found, and whether the loss was finite on all of them.

    Two small all-reduces where parameters are spread over devices, one where they are not, none without axes.
    """
    peaks, squares, share = found
    numbers = [*peaks, *summed(squares, axes), share, (~loss_finite).astype(jnp.float32)]
    packed = worst(jnp.stack(jnp.broadcast_arrays(*numbers)), axes)
    sizes, (share, bad_loss) = packed[:-2], packed[-2:]
    return Measured(sizes[: len(peaks)], sizes[len(peaks) :], share.astype(jnp.float32)), bad_loss == 0


def _peak(gradient: Array) -> Array:
    """Returns the largest magnitude; NaN where there is one."""
    parts = [jnp.max(jnp.abs(part), initial=0.0) for part in real_parts(gradient)]
    return jnp.max(jnp.stack(parts)).astype(_real_wide(gradient))


def _square(gradient: Array) -> Array:
    """Returns the sum of the squares."""
    wide = [part.astype(_real_wide(gradient)) for part in real_parts(gradient)]
    return jnp.sum(jnp.stack([jnp.sum(jnp.square(part)) for part in wide]))


def _share_above(gradients: Sequence[Array], edge: float) -> Array:
    """Returns the share of all elements whose magnitude is above `edge`; inf and NaN are. Complex ones count as two."""
    parts = [part.astype(_real_wide(part)) for gradient in gradients for part in real_parts(gradient)]
    counts = [jnp.sum(~(jnp.abs(part) <= edge), dtype=jnp.uint32).astype(jnp.float32) for part in parts]
    return jnp.sum(jnp.stack([jnp.float32(0), *counts])) / max(1, sum(part.size for part in parts))


def _real_wide(gradient: Array) -> jnp.dtype:
    """Returns the type in which sizes of `gradient` are added up: float32, or float64 where it is."""
    return jnp.finfo(wide_type(gradient)).dtype
