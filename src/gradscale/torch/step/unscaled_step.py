"""A step without a scale, for `NoScaling`: what `optimizer.step()` does, with clipping if it was asked for."""

from collections.abc import Sequence

import torch

from gradscale.policies.contract import Seen
from gradscale.torch.step.apply import apply_plainly
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.gradients import Names, collect, parameters_of
from gradscale.torch.step.measure import measure
from gradscale.torch.step.result import StepResult

Optimizer = torch.optim.Optimizer


def step_plainly(
    rule: Rule,
    optimizers: Sequence[Optimizer],
    names: Names,
    clip_norm: float | None,
    clip_value: float | None,
    *,
    norm: bool,
) -> StepResult:
    """Updates the optimizers and counts the step. Nothing is checked; gradients are read only for a norm or a bound.

    Does not wait for the device.

    Args:
        rule: has the counter.
        optimizers: those to update.
        names: what their parameters are called.
        clip_norm: bound on the norm of all gradients together.
        clip_value: bound on the magnitude of every element.
        norm: whether to measure the norm; needed for `clip_norm`.
    """
    gradients = collect(optimizers if norm or clip_value is not None else ())
    device = rule.settle(next(parameters_of(optimizers)).device)
    measured = measure(gradients.values if norm else (), device, norm=True)
    yes = torch.ones((), dtype=torch.bool, device=device)
    scale = rule.scale
    seen = Seen(finite=rule.leaf(yes), loss_finite=rule.leaf(yes), norm=rule.leaf(measured.total))
    outcome = rule.decide(seen, scale, clip_norm)
    apply_plainly(optimizers, gradients, None if clip_norm is None else outcome.factor, clip_value)
    rule.state = outcome.state
    return StepResult(
        applied=yes,
        scale=scale,
        next_scale=scale,
        loss_finite=yes,
        attempted=True,
        sizes=measured.sizes,
        gradients=gradients if norm else None,
        names=names,
        grad_norm=measured.total if norm else None,
    )
