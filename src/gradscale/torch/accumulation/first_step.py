"""The steps until a gradient is seen, in which a backward pass that overflows is run again without being asked to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from gradscale.engine.retries import first_retries, guesses_first_scale
from gradscale.policies.peak import PeakState
from gradscale.torch.accumulation.graph import is_repeatable
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.host_copy import HostCopy
from gradscale.torch.step.result import StepResult


@dataclass(slots=True)
class FirstStep:
    """Whether a step with a gradient that is not zero has been applied, as far as the host knows.

    Steps whose gradients are all zero do not end it: they raise the scale, as the cause may be that it is too low, and
    the first gradient that is not zero overflows then.

    Attributes:
        over: whether one has. Never reset, so that later steps do nothing here.
    """

    over: bool = False

    def retries(
        self,
        rule: Rule,
        loss: Tensor,
        kwargs: dict[str, Any],
        last: StepResult | None,
        possible: Callable[[], bool],
    ) -> int:
        """Returns how often the backward pass of `loss` may be run again by default.

        0 once a gradient has been seen, for a policy whose first scale is not a guess, with arguments of `backward`
        other than `retain_graph`, and for a graph that is not known to allow it. Where it is possible, synchronizes
        with the device for the state after the last step, until a gradient has been seen.

        Args:
            rule: the rule for the scale.
            loss: the loss.
            kwargs: arguments of `Tensor.backward`.
            last: the result of the last step; None before the first.
            possible: returns whether the scaler can run a backward pass again at all.
        """
        if self.over or not guesses_first_scale(rule.policy):
            return 0
        if not kwargs.keys() <= {"retain_graph"} or not possible():
            # Without synchronizing: a run which cannot retry does not wait for its results either.
            self.over = last is not None and bool(last.poll())
            return 0
        state = cast(PeakState, rule.state)
        peak, scale = HostCopy(rule.tensor(state.peak), rule.scale).read()
        self.over = peak > 0
        return 0 if self.over or not is_repeatable(loss) else first_retries(rule.policy, scale)
