"""What `GradScaler.step` is asked to clip: the norm of an optimizer's gradients, their elements, or neither."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gradscale.engine.decide import check_clip, unscale_and_clip
from gradscale.torch.drop_in import refusals
from gradscale.torch.drop_in.ranks import Ranks
from gradscale.torch.step import apply
from gradscale.torch.step.gradients import Gradients, collect, parameters_of
from gradscale.torch.step.host_copy import host_value
from gradscale.torch.step.measure import measure_sizes
from gradscale.torch.step.numbers import Numbers

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds on the unscaled gradients of a step, checked when they are given.

    Attributes:
        norm: bound on the norm of all gradients of the optimizer together; None for none.
        value: bound on the magnitude of every element, after the bound on the norm; None for none.
    """

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        check_clip("clip_norm", self.norm)
        check_clip("clip_value", self.value)

    @property
    def asked(self) -> bool:
        """Whether anything is clipped."""
        return self.norm is not None or self.value is not None

    @classmethod
    def for_step(cls, optimizer: Optimizer, given: dict[str, float | None], passed: dict[str, Any]) -> Self:
        """Returns the bounds that are `given` to `step`.

        One that the optimizer's own `step` has an argument for goes there, as in torch: it is added to those `passed`.
        """
        asked = {name: bound for name, bound in given.items() if bound is not None}
        own = {name: bound for name, bound in asked.items() if apply.has_argument(optimizer, name)}
        passed.update(own)
        return cls(*(None if name in own else given[name] for name in ("clip_norm", "clip_value")))

    def factor(self, divisor: Tensor, norm: Tensor) -> Tensor:
        """Returns what gradients with this unscaled `norm` are multiplied by, to unscale and clip them."""
        numbers = Numbers(divisor.device)
        with np.errstate(all="ignore"):
            leaf = unscale_and_clip(numbers.leaf(divisor), numbers.leaf(norm), self.norm, numbers.xp)
        return numbers.tensor(leaf)

    def edit(self, gradients: Gradients, factor: Tensor | None, overflow: Tensor) -> None:
        """Multiplies the gradients by `factor` and bounds their elements, in place, if `overflow` is 0, one float32."""
        if known := host_value(overflow):
            return
        bound = None if self.value is None else torch.full_like(overflow, self.value)
        if known is None:
            skips = overflow != 0
            factor = None if factor is None else torch.where(skips, 1.0, factor)
            bound = None if bound is None else torch.where(skips, torch.inf, bound)
        if factor is not None:
            apply.multiply(gradients.values, factor)
        if bound is not None:
            apply.clamp(gradients.values, bound)


def step_unscaled(optimizer: Optimizer, clip: Clip, ranks: Ranks, *args: Any, **kwargs: Any) -> Any:
    """Returns what the optimizer's `step` returns, with gradients that were never scaled clipped before it.

    For a scaler that is disabled. A norm that is not finite makes gradients NaN, as in `clip_grad_norm_`.
    """
    if clip.asked:
        refusals.refuse_closure(*args, **kwargs)
        if clip.norm is None:
            clip.edit(collect([optimizer]), None, _no(optimizer))
        else:
            clip_norm_of_unscaled(optimizer, clip, ranks)
    return optimizer.step(*args, **kwargs)


def clip_norm_of_unscaled(optimizer: Optimizer, clip: Clip, ranks: Ranks) -> Tensor:
    """Clips gradients that were never scaled, and returns their norm before it, which is bounded."""
    gradients, no = collect([optimizer]), _no(optimizer)
    measured = measure_sizes(gradients.values, no.device, norm=True, amax=False)
    norm = ranks.norm(optimizer, gradients, measured, no.device)
    clip.edit(gradients, clip.factor(torch.ones_like(norm), norm), no)
    return norm


def _no(optimizer: Optimizer) -> Tensor:
    """Returns a flag that is not set, where the parameters of `optimizer` are."""
    return torch.zeros((), dtype=torch.float32, device=next(parameters_of([optimizer])).device)
