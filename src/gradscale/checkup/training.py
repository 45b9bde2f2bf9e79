"""A few steps of a user's training, and what is wrong with them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from gradscale.checkup.targets import BadTarget, Training
from gradscale.engine.health import HEALTHY, Health
from gradscale.engine.probe_report import ProbeReport
from gradscale.engine.result import Status
from gradscale.torch import LossScaler, StepResult, Verdict
from gradscale.torch.probing.run import check_loss

LEARNING_RATE = 1e-4
"""Of the AdamW that is used where the function returns no optimizer."""

MOST_BATCHES = 64
"""Batches that are taken from the function, and repeated after the last."""


@dataclass(frozen=True, slots=True)
class Checkup:
    """What a few steps have shown.

    Attributes:
        losses: of every step.
        scales: after every step.
        skipped: the steps that were skipped, counted from 1, each with its status and its non-finite parameters.
        health: of the run after the last step.
        report: of a probe of the last step that was skipped, first of those whose loss was not finite; None if the run
            is healthy.
    """

    losses: list[float]
    scales: list[float]
    skipped: dict[int, str]
    health: Health
    report: ProbeReport | None = None

    @property
    def healthy(self) -> bool:
        """Whether nothing needs to be done."""
        return self.health.condition in HEALTHY and (self.report is None or self.report.verdict is Verdict.FINITE)


def check_training(training: Training, steps: int, policy: Any = "auto") -> Checkup:
    """Runs a few steps, with a probe of the last skipped one if the run is not healthy or a loss was not finite."""
    model, loss_fn = training.model, training.loss_fn
    optimizer = training.optimizer or torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scaler = LossScaler(model, policy, on_stuck="ignore")
    losses: list[float] = []
    scales: list[float] = []
    skipped: dict[int, str] = {}
    last_bad: dict[Status, tuple[Any, float]] = {}
    last_good: Any = None
    for index, batch in enumerate(_repeated(training.batches, steps), 1):
        loss = _checked(loss_fn(model, batch))
        losses.append(float(loss.detach()))
        scaler.backward(loss)
        result = scaler.step(optimizer)
        optimizer.zero_grad()
        scales.append(float(result.next_scale))
        if result.skipped():
            skipped[index] = _described(result)
            last_bad[result.status()] = batch, float(result.scale)
        else:
            last_good = (batch,)
    checkup = Checkup(losses, scales, skipped, scaler.health())
    # A loss that is not finite comes first: no search for a scale explains it, however many steps were applied since.
    chosen = last_bad.get(Status.NONFINITE_LOSS) or last_bad.get(Status.OVERFLOW)
    ended_well = checkup.healthy and len(losses) not in skipped
    if chosen is None or (ended_well and Status.NONFINITE_LOSS not in last_bad):
        return checkup
    batch, scale = chosen
    other = None if last_good is None else lambda: loss_fn(model, last_good[0])
    report = scaler.probe(lambda: loss_fn(model, batch), other=other, scale=scale)
    return Checkup(losses, scales, skipped, checkup.health, report)


def _repeated(batches: Iterable[Any], steps: int) -> Iterator[Any]:
    """Yields as many batches as there are steps, some of them again where there are fewer."""
    held = list(islice(batches, min(steps, MOST_BATCHES)))
    if not held:
        raise BadTarget("The function must return at least one batch. Received: none.")
    return islice(cycle(held), steps)


def _checked(loss: Any) -> Tensor:
    try:
        return check_loss(loss, "loss_fn")
    except TypeError as error:
        raise BadTarget(str(error)) from None


def _described(result: StepResult) -> str:
    culprits = result.culprits()
    named = ", ".join(f"{each.name} ({each.kind})" for each in culprits[:3])
    return f"{result.status()}{': ' if named else ''}{named}{', ...' if len(culprits) > 3 else ''}"
