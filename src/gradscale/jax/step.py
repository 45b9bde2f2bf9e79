"""The stages of a step in their order: measure and agree for each attempt, then decide and remember.

`apply`, which is between the last two, is called by the user with the result.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from gradscale.engine.plan import Plan
from gradscale.jax.agree import Agreed, agree
from gradscale.jax.axes import Axes, AxisNames
from gradscale.jax.decide import decide, unscaled
from gradscale.jax.measure import measure
from gradscale.jax.remember import StepResult
from gradscale.jax.tree import Gradients, Split
from gradscale.policies.contract import Policy
from gradscale.policies.static import multiplies


class Attempt(NamedTuple):
    """Gradients of one backward pass, and what was measured of them.

    Attributes:
        state: the state whose scale made them.
        gradients: the gradients, scaled; and next values, which are not.
        agreed: what was measured, on every device.
    """

    state: Any
    gradients: Gradients
    agreed: Agreed


@dataclass(frozen=True, slots=True)
class Step:
    """What is known of a step before it runs.

    Attributes:
        policy: the rule for the scale.
        plan: what to read of the gradients.
        clip_norm: bound on the norm of all gradients together, unscaled.
        axes: the mapped axes.
    """

    policy: Policy
    plan: Plan
    clip_norm: float | None
    axes: Axes

    @classmethod
    def of(
        cls,
        policy: Policy,
        clip_norm: float | None,
        norm: bool,
        params: Split,
        axis_names: AxisNames,
        mean_axes: AxisNames,
        specs: Any,
    ) -> Self:
        """Returns the step for the caller's arguments. Call it where the step is traced: axes are known only there."""
        plan = Plan.of(policy, norm=norm, clip_norm=clip_norm)
        sums = plan.norm or plan.edge is not None
        return cls(policy, plan, clip_norm, Axes.of(axis_names, mean_axes, specs, params, sums=sums))

    def attempt(self, state: Any, gradients: Gradients, loss_finite: Array) -> Attempt:
        """Returns gradients that the scale of `state` made, measured and agreed on."""
        local = measure(gradients.trained, self.plan)
        return Attempt(state, gradients, agree(local, loss_finite, state.scale, self.plan, self.axes))

    def finish(
        self, before: Any, last: Attempt, names: tuple[str, ...], retries: Array | int = 0
    ) -> tuple[Gradients, Any, StepResult]:
        """Returns the gradients to apply, the next state, and the result of the step.

        `before` is the state before the first attempt, and `retries` how many attempts came before the last.
        """
        seen, outcome = decide(self.policy, before, last.state, last.agreed, self.clip_norm)
        attempted = bool(last.gradients.trained)
        after = outcome.state if attempted else before
        result = StepResult(
            applied=outcome.applied if attempted else jnp.zeros_like(outcome.applied),
            scale=jnp.copy(last.state.scale),  # the scaler's own arrays may be donated while the result is kept
            next_scale=jnp.copy(after.scale),
            loss_finite=last.agreed.loss_finite,
            grad_norm=seen.norm if self.plan.norm and attempted else None,
            amax=seen.amax if self.plan.amax and attempted else None,
            retries=jnp.asarray(retries, jnp.int32),
            attempted=attempted,
            sizes=last.agreed.measurement.sizes,
            names=names,
            gated=self.plan.checks,
            clip_norm=self.clip_norm,
            scale_range=last.agreed.scale_range,
        )
        multiplied = multiplies(self.policy) or self.clip_norm is not None
        trained = unscaled(last.gradients.trained, outcome, gated=self.plan.checks, multiplied=multiplied)
        return last.gradients._replace(trained=tuple(trained)), after, result
