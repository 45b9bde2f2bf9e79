"""Schedules that are held late: where only the device knows at first whether a step was skipped."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from tests.integrations.lightning.runs import L
from torch import nn

from gradscale.integrations.lightning.schedules import HeldSchedules


@dataclass
class Late:
    """The result of a step that is known after it was asked for a few times."""

    applied: bool
    polls: int

    def poll(self) -> bool | None:
        self.polls -= 1
        return self.applied if self.polls < 0 else None

    def skipped(self) -> bool:
        self.polls = 0
        return not self.applied


def started() -> tuple[HeldSchedules, Any, Any]:
    module: Any = L.LightningModule()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    held = HeldSchedules([LRSchedulerConfig(schedule, interval="step")])
    held.attach(module)
    return held, module, schedule


def run(held: HeldSchedules, module: Any, schedule: Any, *results: Late) -> list[int]:
    epochs = []
    for result in results:
        held.add(cast(Any, result))
        module.lr_scheduler_step(schedule, None)
        epochs.append(schedule.last_epoch)
    return epochs


def test_schedule_is_held_when_a_skip_becomes_known() -> None:
    held, module, schedule = started()
    results = [Late(True, 0), Late(False, 2), Late(True, 0), Late(True, 0), Late(True, 0)]
    assert run(held, module, schedule, *results) == [1, 2, 3, 3, 4]
    assert held.state() == [0]


def test_skips_that_become_known_together_hold_one_after_the_other() -> None:
    held, module, schedule = started()
    results = [Late(False, 1), Late(False, 0), Late(True, 0), Late(True, 0)]
    assert run(held, module, schedule, *results) == [1, 1, 1, 2]


def test_what_is_left_to_hold_is_saved_and_loaded() -> None:
    held, module, schedule = started()
    assert run(held, module, schedule, Late(False, 5)) == [1]
    assert held.state() == [1]
    other, module, schedule = started()
    other.load([1])
    assert run(other, module, schedule, Late(True, 0), Late(True, 0)) == [0, 1]
