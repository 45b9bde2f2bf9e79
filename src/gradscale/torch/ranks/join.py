"""Ranks that run out of batches before others, inside torch's `Join`: they follow every step until the last ends."""

from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.join import JoinHook


class FollowingRank(JoinHook):
    """Follows the steps of other ranks on one that has no batches left, so that its scale stays the same as theirs."""

    def __init__(self, follow: Callable[[], None]) -> None:
        """Calls `follow` for each step of the others."""
        self._follow = follow

    def main_hook(self) -> None:
        """Takes part in one step of the others."""
        self._follow()


def check_joins(joining: bool, config: Any) -> None:
    """Raises if the model is inside of a `Join` and the scaler is not, or comes first.

    `config` is what `Join` has set on the scaler; None if it never has.
    """
    if joining and not (config is not None and config.enable):
        raise RuntimeError(
            "Inside `model.join()` ranks run out of batches one by one, and those that have none left must follow the "
            "scale. Received: a `Join` without the scaler. Use `with Join([model, scaler]):` from "
            "`torch.distributed.algorithms.join`."
        )
    if joining and config.is_first_joinable:
        raise RuntimeError(
            "`Join` runs what its members send in their order, and the model sends first. Received: the scaler as the "
            "first. Use `with Join([model, scaler]):`."
        )
