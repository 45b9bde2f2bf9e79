"""The windows of a scaler, one after the other: opened by a loss, and closed by a step or for want of one."""

from collections.abc import Sequence

import torch

from gradscale.torch.accumulation.stale import Leftovers
from gradscale.torch.accumulation.window import Window
from gradscale.torch.checks import check_order, refuse_some_unscaled, refuse_stale, refuse_strangers
from gradscale.torch.step.decide import Rule
from gradscale.torch.step.gradients import Names

Optimizer = torch.optim.Optimizer


class Windows:
    """Opens windows at the scale of the rule, and sees to it that no gradient gets from one into another.

    Attributes:
        open: the window that is open; None between a step and the next loss.
    """

    def __init__(self, rule: Rule, names: Names) -> None:
        self.open: Window | None = None
        self._rule = rule
        self._names = names
        self._leftovers = Leftovers(names.modules)

    def get(self, device: torch.device) -> Window:
        """Returns the open window; opens one, on `device` if none is settled yet, where there is none."""
        if self.open is None:
            self._rule.settle(device)
            self.open = Window(self._rule.scale, self._leftovers.uncleared, current=lambda: self.get(device))
        return self.open

    def ready(self, optimizers: Sequence[Optimizer]) -> Window:
        """Returns the window whose gradients are to be used, or says what is wrong with the order of calls."""
        window = check_order(self.open)
        refuse_some_unscaled(window, optimizers)
        try:
            refuse_stale(window, optimizers, self._names)
            refuse_strangers(window, optimizers, self._names)
        except RuntimeError:
            self.close(optimizers)
            raise
        return window

    def close(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """Ends the window, if one is open. Gradients that are there now must be cleared before the next one begins.

        Args:
            optimizers: those whose step ends it.
        """
        self.open = None
        self._leftovers.remember(optimizers)
