"""The first steps of a run, in which a backward pass that overflows is run again without being asked to."""

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
class FirstSteps:
    """Whether the first steps of a run have been applied, as far as the host knows.

    Attributes:
        over: whether they have. Never reset, so that later steps do nothing here.
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

        0 once the first steps are over, for a policy whose first scale is not a guess, with arguments of `backward`
        other than `retain_graph`, and for a graph that is not known to allow it. Where it is possible, synchronizes
        with the device for the state after the last step, until they are over.

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
        facts = HostCopy(rule.tensor(state.peak), rule.tensor(state.applied), rule.scale)
        count = first_retries(rule.policy, *facts.read())
        self.over = count == 0
        return count if count and is_repeatable(loss) else 0
