"""A step without a scale, for `NoScaling`: what `optimizer.step()` does, and clipping."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.engine.measurement import Measurement
from gradscale.kernels.torch import CPU
from gradscale.policies.contract import Seen
from gradscale.torch.step.agree import Agreement
from gradscale.torch.step.apply import clamp, multiply, step_folded
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.gradients import Gradients, Names, collect, keeps_masters, parameters_of
from gradscale.torch.step.measure import measure_sizes
from gradscale.torch.step.result import StepResult, Traces

Optimizer = torch.optim.Optimizer


class Unscaled(NamedTuple):
    """Gradients of losses that were not scaled.

    Attributes:
        gradients: those that are read or bounded.
        measured: their norm, 0 where it is not asked for.
    """

    gradients: Gradients
    measured: Measurement

    def agreed(self, agreement: Agreement, scale: Tensor, *, norm: bool) -> "Unscaled":
        """Returns them with the norm over all ranks: one round, in which the scales are compared, too."""
        if not norm:
            agreement.compare(scale)
            return self
        return self._replace(measured=self.measured._replace(norm=agreement.norm(*self, scale)))


def read_unscaled(rule: Rule, optimizers: Sequence[Optimizer], *, norm: bool, bounds: bool) -> Unscaled:
    """Returns the gradients that a step needs, for a `norm` or for `bounds` on elements, and their norm on this rank.

    Does not synchronize with the device.
    """
    gradients = collect(optimizers if norm or bounds else ())
    # An optimizer may have no parameters yet: groups can be added later.
    device = rule.settle(next((parameter.device for parameter in parameters_of(optimizers)), CPU))
    return Unscaled(gradients, measure_sizes(gradients.values if norm else (), device, norm=True, amax=False))


def step_without_scaling(
    rule: Rule,
    optimizers: Sequence[Optimizer],
    unscaled: Unscaled,
    names: Names,
    clip_norm: float | None,
    clip_value: float | None,
    *,
    norm: bool,
) -> StepResult:
    """Updates the optimizers and counts the step. Nothing is checked. Does not synchronize with the device."""
    gradients, measured = unscaled
    scale = rule.scale
    yes = torch.ones((), dtype=torch.bool, device=scale.device)
    seen = Seen(finite=rule.leaf(yes), loss_finite=rule.leaf(yes), norm=rule.leaf(measured.norm))
    decision = rule.decide(seen, scale, clip_norm)
    _apply(optimizers, gradients, None if clip_norm is None else decision.factor, clip_value)
    rule.commit(decision)
    return StepResult(
        applied=yes,
        scale=scale,
        next_scale=scale,
        loss_finite=yes,
        grad_norm=measured.norm if norm else None,
        sizes=measured.sizes,
        traces=Traces(gradients) if norm else None,
        parameter_names=names,
        known=True,
    )


def _apply(
    optimizers: Sequence[Optimizer], gradients: Gradients, factor: Tensor | None, clip_value: float | None
) -> None:
    """Updates every optimizer with its gradients times `factor`, finite or not."""
    if factor is not None:
        # An optimizer that keeps masters divides in float32: multiplying here would round 16-bit gradients once more.
        # Not a gradient that another optimizer holds too, which would be multiplied there as well.
        once = [optimizer for optimizer in optimizers if optimizer not in gradients.sharing]
        folding = [optimizer for optimizer in once if clip_value is None and keeps_masters(optimizer)]
        optimizers = [optimizer for optimizer in optimizers if optimizer not in folding]
        multiply(gradients.owned_by(optimizers).values if folding else gradients.values, factor)
        for optimizer in folding:
            step_folded(optimizer, 1.0 / factor, torch.ones_like(factor, dtype=torch.bool))
    if clip_value is not None:
        # On the CPU, whatever torch's default device is: `clamp` copies it to the device of the gradients.
        clamp(gradients.values, torch.tensor(clip_value, dtype=torch.float32, device="cpu"))
    for optimizer in optimizers:
        optimizer.step()
