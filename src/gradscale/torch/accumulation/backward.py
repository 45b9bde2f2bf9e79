"""The losses of `LossScaler`, scaled for a backward pass that may be run again at a lower scale if it overflows."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from gradscale.torch.accumulation.first_steps import FirstSteps
from gradscale.torch.accumulation.retry import Retry, check_backward, check_retriable, synchronizing
from gradscale.torch.accumulation.window import Windows
from gradscale.torch.bf16 import FirstLoss
from gradscale.torch.ranks.rounds import Rounds
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.result import StepResult


class Backward:
    """Scales losses and runs their backward passes.

    Attributes:
        first_loss: what the first loss shows.
        first_steps: whether they are over: until then a backward pass is run again by default.
    """

    def __init__(self, modules: Sequence[nn.Module], rule: Rule, windows: Windows, rounds: Rounds) -> None:
        self.first_loss = FirstLoss()
        self.first_steps = FirstSteps()
        self._modules = modules
        self._rule = rule
        self._windows = windows
        self._rounds = rounds

    def note(self, loss: Tensor) -> None:
        """Notes the types of the first loss."""
        self.first_loss.note(loss, self._rule.policy, "LossScaler")

    def scaled(self, loss: Tensor) -> Tensor:
        """Returns a loss times the scale of the open window."""
        self.note(loss)
        return self._windows.get(loss.device).scaled(loss)

    def retries(self, loss: Tensor, asked: int | None, kwargs: dict[str, Any], last: StepResult | None) -> int:
        """Returns how often the backward pass of `loss` may be run again, or raises if it cannot be.

        Args:
            loss: the loss.
            asked: how often the user wants it to be; None for the default.
            kwargs: those of `Tensor.backward`.
            last: the result of the last step; None before the first.
        """
        policy = self._rule.policy
        if asked is None:
            return self.first_steps.retries(self._rule, loss, kwargs, last, self._may_retry)
        check_backward(asked, kwargs)
        if asked and policy.needs:
            check_retriable(self._modules)
        return asked if policy.needs else 0

    def run(self, loss: Tensor, retries: int, kwargs: dict[str, Any], parameters: Sequence[Tensor] = ()) -> None:
        """Runs the backward pass of `loss`, again at a lower scale while it overflows.

        `parameters` are those that share the scale beside the ones that are known.
        """
        self.note(loss)
        together = {id(each): each for each in (*parameters, *self._windows.sharing_the_scale(loss))}
        window = self._windows.begin(loss.device)
        Retry(list(together.values()), self._rule, self._rounds.any_rank).backward(loss, window, retries, kwargs)
        window.end_backward()

    @property
    def once(self) -> bool:
        """Whether a backward pass can be run only once: nothing is scaled, or it sends gradients to other ranks."""
        return not self._rule.policy.needs or any(map(synchronizing, self._modules))

    def _may_retry(self) -> bool:
        """Returns whether a backward pass may be run again without being asked to."""
        # In one process: a rank that has no loss would not take part in the agreement of the others.
        return bool(self._modules) and self._rounds.ranks == 1 and not any(map(synchronizing, self._modules))
