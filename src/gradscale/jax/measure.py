"""Room one, measure: a read of the gradients that says whether they are finite, how large, and which are not."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from gradscale.formats import FP32
from gradscale.jax.agree import summed, worst
from gradscale.kernels.jax import peak, share_above, square, total
from gradscale.policies.contract import Policy, Seen


class Measured(NamedTuple):
    """What was found in the gradients, still scaled. A part that nobody asked for has no elements.

    Attributes:
        magnitudes: largest magnitude in each gradient if the policy follows it, else the sum of all magnitudes.
        squares: sum of the squares of each gradient.
        share: share of the elements above the edge that a policy watches, 0-d.
    """

    magnitudes: Array
    squares: Array
    share: Array

    @property
    def sizes(self) -> Array:
        """One number per gradient, no less than its largest magnitude; inf or NaN where the gradient holds one."""
        # A little more than the root, so that its rounding cannot make it less.
        return self.magnitudes if self.magnitudes.size else jnp.sqrt(self.squares) * 1.0001

    @property
    def norm(self) -> Array:
        """Norm of all gradients together, scaled. Its derivative at zero is zero; that of a bare root is NaN."""
        total = jnp.sum(self.squares)
        return jnp.where(total == 0, 0.0, jnp.sqrt(jnp.where(total == 0, 1.0, total)))

    def finite(self, unit: Array) -> Array:
        """Returns whether every gradient is finite, now and once it is divided by `unit`, and whether its squares are.

        Squares that overflow would make the norm inf, and clipping by it would make all gradients zero.
        """
        return jnp.all(jnp.isfinite(self.sizes / unit)) & jnp.all(jnp.isfinite(self.squares))

    def seen(self, unit: Array, loss_finite: Array) -> Seen:
        """Returns the facts that the decision is made from, in true units.

        Args:
            unit: the scale that made the gradients.
            loss_finite: whether the loss was finite, on every device.
        """
        unscale = 1.0 / unit
        finite = self.finite(unit)
        amax = jnp.minimum(jnp.max(self.magnitudes, initial=0.0) * unscale, FP32.max)
        return Seen(
            finite=finite,
            loss_finite=loss_finite,
            amax=jnp.where(finite, amax, FP32.max).astype(jnp.float32),
            norm=self.norm * unscale,
            upper_share=self.share,
        )


class Found(NamedTuple):
    """What one device found, as in `Measured`: lists with a number for each gradient, empty where nobody asked."""

    magnitudes: list[Array]
    squares: list[Array]
    share: Array


def measure(gradients: Sequence[Array], policy: Policy, *, norm: bool) -> Found:
    """Returns what this device finds in the gradients. Reads them once for each size that is asked.

    Whether all is finite comes with a size and costs no read of its own. Finite gradients count as an overflow where
    their sum is one: from 1.8e19 on where the norm is wanted.

    Args:
        gradients: floating-point or complex arrays.
        policy: says what it needs.
        norm: whether the norm is wanted.
    """
    edge: float = getattr(policy, "edge_magnitude", math.inf)
    if "amax" in policy.needs:
        magnitudes = [peak(gradient) for gradient in gradients]
    else:
        magnitudes = [total(gradient) for gradient in gradients] if policy.needs and not norm else []
    return Found(
        magnitudes=magnitudes,
        squares=[square(gradient) for gradient in gradients] if norm else [],
        share=share_above(gradients, edge) if "upper_share" in policy.needs else jnp.float32(0),
    )


def agreed(found: Found, loss_finite: Array, axes: Sequence[str]) -> tuple[Measured, Array]:
    """Returns what all devices together found, and whether the loss was finite on all of them.

    Two small all-reduces where parameters are spread over devices, one where they are not, none without axes.
    """
    numbers = [*found.magnitudes, *summed(found.squares, axes), found.share, (~loss_finite).astype(jnp.float32)]
    packed = worst(jnp.stack(jnp.broadcast_arrays(*numbers)), axes)
    end = len(found.magnitudes)
    return Measured(packed[:end], packed[end:-2], packed[-2].astype(jnp.float32)), packed[-1] == 0
