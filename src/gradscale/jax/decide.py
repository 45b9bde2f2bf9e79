"""Decide, the third stage: the policy's next state, one gate, and one factor that unscales and clips."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gradscale.engine import decide as engine
from gradscale.formats import FP32
from gradscale.jax.agree import Agreed
from gradscale.kernels.jax import wide_type
from gradscale.policies.contract import Policy, Seen


def decide(
    policy: Policy, before: Any, used: Any, agreed: Agreed, clip_norm: float | None
) -> tuple[Seen, engine.Outcome]:
    """Returns the facts of the step, unscaled, and the decision that follows from them.

    `before` is the state before the first attempt, `used` the one whose scale made the gradients: `before` itself where
    nothing was run again.
    """
    measurement = agreed.measurement
    seen = measurement.seen(used.scale, agreed.loss_finite, jnp)
    if measurement.amax is not None and seen.amax.dtype != jnp.float32:
        # A float64 would change the type of the state that a policy puts it into. The largest float32 stands for a
        # finite one that does not fit.
        fits = jnp.where(jnp.isfinite(seen.amax), jnp.minimum(seen.amax, FP32.max), seen.amax)
        seen = replace(seen, amax=fits.astype(jnp.float32))
    # If the last attempt overflowed too, the rule continues from the state before the first, and backs off once.
    # Gradients that are NaN at any scale would otherwise lower the scale to its minimum in a few steps.
    state = before if used is before else jax.tree.map(lambda *pair: jnp.where(seen.finite, *pair), used, before)
    # Gradients that scales of several sizes made cannot be unscaled. As after a loss that is not finite, the step is
    # skipped and no scale changes: they stay apart, and the next step is skipped too.
    judged = seen if agreed.scale_range is None else replace(seen, loss_finite=seen.loss_finite & agreed.in_sync)
    return seen, engine.decide(policy, state, judged, jnp, clip_norm, used.scale)


def unscaled(gradients: Sequence[Array], outcome: engine.Outcome, *, gated: bool, multiplied: bool) -> list[Array]:
    """Returns the gradients times the factor, in float32 or wider; zeros in a step that is skipped, if one can be.

    Unless they are `multiplied`, the factor of an applied step is 1.
    """
    factor = outcome.factor if multiplied else None
    return [_unscaled(gradient, factor, outcome.applied if gated else None) for gradient in gradients]


def _unscaled(gradient: Array, factor: Array | None, applied: Array | None) -> Array:
    wide = wide_type(gradient)
    product = gradient.astype(wide)
    if factor is not None:
        product = (product * factor).astype(wide)
    # The factor of a skipped step is zero, but zero times inf is NaN.
    return product if applied is None else jnp.where(applied, product, jnp.zeros_like(product))
