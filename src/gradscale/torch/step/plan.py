"""The plan of a step, made before anything is measured: what to read, whether to divide in place, and what to fold."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscale.engine.measurement import reads_amax
from gradscale.engine.plan import Plan
from gradscale.policies.static import multiplies
from gradscale.torch.accumulation.window import Window
from gradscale.torch.step.apply import folds
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.gradients import Gradients, collect, keeps_masters
from gradscale.torch.step.host_copy import host_value

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step works on, and how.

    Attributes:
        optimizers: all that are updated together, or not at all.
        window: the accumulation window that the step ends.
        gradients: all gradients of the optimizers.
        divisor: what they must be divided by: the scale of their losses, or 1 where `unscaled` has divided them.
        norm: whether their norm is read.
        amax: whether their largest magnitude is read.
        edge: magnitude above which their elements are counted; None where the policy does not need it.
        estimates_amax: whether the policy follows the largest magnitude, which a norm that is read at every step
            replaces at most steps.
        divides: whether they are divided in the pass that checks them. Only where no size is needed, no optimizer folds
            the division into its own kernel, and no finite gradient can overflow by it.
        keeps: whether they are applied as they are: the scale is always 1, and their norm is not clipped.
        grows: whether the divisor may be below 1, so that a finite gradient may not be finite once divided.
        half: whether FP16 gradients are divided in FP16 by a divisor that may be below 1.
        folding: the optimizers whose kernels divide the gradients and skip the update themselves.
        divided_first: the optimizers whose gradients are divided before any of them is stepped.
        clip_norm: bound on the norm of all gradients together, unscaled.
        clip_value: bound on the magnitude of every element, unscaled.
    """

    optimizers: Sequence[Optimizer]
    window: Window
    gradients: Gradients
    divisor: Tensor
    norm: bool
    amax: bool
    edge: float | None
    estimates_amax: bool
    divides: bool
    keeps: bool
    grows: bool
    half: bool
    folding: Sequence[Optimizer]
    divided_first: Sequence[Optimizer]
    clip_norm: float | None = None
    clip_value: float | None = None

    @property
    def sizes(self) -> bool:
        """Whether a size of the gradients is read, and not only whether all of them are finite."""
        return self.norm or self.amax or self.edge is not None

    @property
    def finds_amax(self) -> bool:
        """Whether the largest magnitude is known after the step: read beside a norm, or as the size itself."""
        return self.amax or self.edited or (self.sizes and not self.norm)

    @property
    def edited(self) -> bool:
        """Whether `unscaled` has divided the gradients, for edits by the user."""
        return self.divisor is not self.window.scale


def plan_step(
    rule: Rule,
    optimizers: Sequence[Optimizer],
    window: Window,
    *,
    norm: bool,
    sample: bool,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    fold: bool = True,
) -> StepPlan:
    """Returns the plan of the step that ends `window`. Reads no gradient and does not synchronize.

    Where a norm is read, amax is read at some steps and estimated at others. With `norm` the result has the norm, with
    `sample` the metrics get the largest magnitude. `fold` is False if the scaler does not step the optimizers itself,
    whose kernels then cannot divide.
    """
    reads = Plan.of(rule.policy, norm=norm, clip_norm=clip_norm)
    gradients = collect(optimizers)
    # Compared by identity with the scale, which costs no host read.
    divisor = (
        torch.ones_like(window.scale) if window.unscaled and not window.unscaled.rest_of(gradients) else window.scale
    )
    # Gradients that `unscaled` has divided may have been edited: their sizes were noted before the edits.
    as_made = divisor is window.scale
    follows = reads.amax and reads.norm and as_made
    # By the number of the step alone where later estimates depend on it, so that a resumed run is bit-exact.
    amax = as_made and (reads_amax(rule.steps) if follows else sample or reads.amax)
    edge = reads.edge if as_made else None
    grows = as_made and not _at_least_one(divisor, rule)
    folding = [optimizer for optimizer in optimizers if fold and folds(optimizer)]
    scales = multiplies(rule.policy)
    any_size = reads.norm or amax or edge is not None
    return StepPlan(
        optimizers=optimizers,
        window=window,
        gradients=gradients,
        divisor=divisor,
        norm=reads.norm,
        amax=amax,
        edge=edge,
        estimates_amax=follows,
        divides=scales and fold and as_made and not (any_size or grows or folding or clip_value is not None),
        keeps=not scales and clip_norm is None,
        grows=grows,
        half=grows and not all(map(keeps_masters, optimizers)),
        folding=folding,
        # Fused kernels write the divided gradient back, so that two which share one would divide it twice; and the
        # bound of a clip by value is on unscaled elements.
        divided_first=gradients.sharing if clip_value is None else optimizers,
        clip_norm=clip_norm,
        clip_value=clip_value,
    )


def _at_least_one(scale: Tensor, rule: Rule) -> bool:
    """Returns whether `scale` is known to be at least 1, so that no finite gradient divided by it is infinite."""
    # On a device only a bound is known: reading the scale would synchronize.
    known = host_value(scale)
    return (rule.lowest_scale if known is None else known) >= 1.0
