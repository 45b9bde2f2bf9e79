"""The steps until one is applied, in which a backward pass that overflows is run again without being asked to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradscale.engine.retries import first_retries
from gradscale.policies.contract import Policy
from gradscale.torch.accumulation.graph import is_repeatable
from gradscale.torch.step.result import StepResult


@dataclass(slots=True)
class FirstStep:
    """Whether a step has been applied, as far as the host knows.

    Attributes:
        applied: whether one has. Never reset, so that later steps do nothing here.
    """

    applied: bool = False

    def retries(
        self,
        policy: Policy,
        loss: Tensor,
        kwargs: dict[str, Any],
        last: StepResult | None,
        possible: Callable[[], bool],
    ) -> int:
        """Returns how often the backward pass of `loss` may be run again by default.

        0 once a step has been applied, for a policy whose first scale is not a guess, with arguments of `backward`
        other than `retain_graph`, and for a graph that is not known to allow it. Where it is possible, synchronizes
        with the device for the result of the last step, until one was applied.

        Args:
            policy: the rule for the scale.
            loss: the loss.
            kwargs: arguments of `Tensor.backward`.
            last: the result of the last step; None before the first.
            possible: returns whether the scaler can run a backward pass again at all.
        """
        if self.applied or not (count := first_retries(policy)):
            return 0
        # Asked without synchronizing first, so that a run which cannot retry does not wait for its result either.
        self.applied = last is not None and bool(last.poll())
        if self.applied or not kwargs.keys() <= {"retain_graph"} or not possible():
            return 0
        self.applied = last is not None and not last.skipped()
        return 0 if self.applied or not is_repeatable(loss) else count
