"""The losses of `LossScaler`, scaled for a backward pass that may be run again at a lower scale if it overflows."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from gradscale.torch.accumulation.retry import Retry, check_backward, check_retriable, synchronizing
from gradscale.torch.accumulation.window import Windows
from gradscale.torch.bf16 import FirstLoss
from gradscale.torch.ranks.rounds import Rounds
from gradscale.torch.step.decide import Rule


class Backward:
    """Scales losses and runs their backward passes.

    Attributes:
        first_loss: what the first loss shows.
    """

    def __init__(self, modules: Sequence[nn.Module], rule: Rule, windows: Windows, rounds: Rounds) -> None:
        self.first_loss = FirstLoss()
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

    def retries(self, asked: int, kwargs: dict[str, Any]) -> int:
        """Returns how often a backward pass with `kwargs` may be run again, or raises if it cannot be."""
        check_backward(asked, kwargs)
        if asked and self._rule.policy.needs:
            check_retriable(self._modules)
        return asked if self._rule.policy.needs else 0

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
