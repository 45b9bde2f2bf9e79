"""Learning-rate schedules of a `Trainer`, held once for every step that is skipped."""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial, update_wrapper
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import LRSchedulerConfig

from gradscale.torch import StepResult

OnSkip = Literal["hold", "advance"]

HOOK = "lr_scheduler_step"
"""What the Trainer calls to advance a schedule."""


def check_on_skip(on_skip: str) -> OnSkip:
    """Returns what schedules do on a skipped step, or raises if it is neither of the two names."""
    if on_skip not in ("hold", "advance"):
        raise ValueError(f'`on_skip` must be "hold" or "advance". Received: on_skip={on_skip!r}.')
    return on_skip


class _Unless:
    """The `lr_scheduler_step` of a module during a run: its own, unless the schedule is held."""

    def __init__(self, holds: Callable[[Any], bool], advance: Callable[[Any, Any], None]) -> None:
        self._holds, self._advance = holds, advance
        update_wrapper(self, advance)  # Lightning asks whether the module has a method of its own

    def __call__(self, scheduler: Any, metric: Any) -> None:
        if not self._holds(scheduler):
            self._advance(scheduler, metric)

    def __reduce__(self) -> tuple[type[partial[None]], tuple[Callable[[Any, Any], None]]]:
        """A copy of the module, which a callback may make or save during a run, has its own method alone."""
        return partial, (self._advance,)


class HeldSchedules:
    """The schedules that advance with every step, and how often each of them must still be held.

    A schedule is in host memory. Where only the device knows whether a step was skipped, it is held when that has
    arrived, one step later at most, and nothing synchronizes for it.
    """

    def __init__(self, configs: Iterable[LRSchedulerConfig]) -> None:
        # Others advance with epochs, or after several steps of which one may have been skipped.
        followed = [config.scheduler for config in configs if config.interval == "step" and config.frequency == 1]
        self._to_hold: dict[int, int] = {id(scheduler): 0 for scheduler in followed}
        self._order = [id(scheduler) for scheduler in followed]
        self._pending: deque[StepResult] = deque()
        self._module: Any = None
        self._before: dict[str, Any] = {}

    def attach(self, module: pl.LightningModule) -> None:
        """Makes the module's `lr_scheduler_step` do nothing where a schedule is held. `detach` undoes it."""
        # The Trainer asks no plugin before it advances a schedule; this hook is what it calls.
        if not self._to_hold:
            return
        # What was set on the module itself, and not by its class, is set again when the run ends.
        self._before = {name: value for name, value in vars(module).items() if name == HOOK}
        module.lr_scheduler_step = _Unless(self._holds, module.lr_scheduler_step)  # type: ignore[method-assign]
        self._module = module

    def detach(self) -> None:
        """Gives the module its own `lr_scheduler_step` back."""
        if self._module is not None:
            del self._module.lr_scheduler_step
            vars(self._module).update(self._before)
            self._module, self._before = None, {}

    def add(self, result: StepResult | None) -> None:
        """Notes the result of a step. Does not synchronize with the device."""
        if result is not None and self._to_hold:
            self._pending.append(result)

    def _receive(self) -> None:
        while self._pending and (applied := self._pending[0].poll()) is not None:
            self._pending.popleft()
            if not applied:
                self._to_hold = {key: count + 1 for key, count in self._to_hold.items()}

    def _holds(self, scheduler: Any) -> bool:
        self._receive()
        left = self._to_hold.get(id(scheduler), 0)
        if left:
            self._to_hold[id(scheduler)] = left - 1
        return left > 0

    def state(self) -> list[int]:
        """Returns how often each schedule must still be held. Synchronizes with the device."""
        for result in self._pending:
            result.skipped()
        self._receive()
        return [self._to_hold[key] for key in self._order]

    def load(self, state: Iterable[int]) -> None:
        """Continues from what `state` returned."""
        self._pending.clear()
        known = iter(state)
        self._to_hold = {key: next(known, 0) for key in self._order}
