"""A few steps of a user's training, and what is wrong with them."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.checkup.targets import BadTarget, Training
from gradscale.engine.health import HEALTHY, LOST_SHARE, Health, health_of
from gradscale.engine.probe_report import ProbeReport
from gradscale.engine.result import Status
from gradscale.torch import LossScaler, StepResult
from gradscale.torch.calibrate import no_autocast
from gradscale.torch.probing.run import Probe, Step, check_loss

LEARNING_RATE = 1e-4
"""Of the AdamW that is used where the function returns no optimizer."""

MOST_BATCHES = 64
"""Batches that are taken from the function, and repeated after the last."""


@dataclass(frozen=True, slots=True)
class Checkup:
    """What a few steps have shown."""

    losses: list[float]  # of every step
    scales: list[float]  # after every step
    skipped: dict[int, str]  # the steps that were skipped, counted from 1, each with its status and its culprits
    health: Health  # of the run after the last step
    warned: list[str]  # the warnings of the run
    report: ProbeReport | None = None  # of the first bad loss; else, if the run is not healthy, of the first overflow
    probed: int | None = None  # the step of the report

    @property
    def healthy(self) -> bool:
        """Whether nothing needs to be done."""
        return self.health.condition in HEALTHY and self.report is None


def check_training(training: Training, steps: int, policy: Any = "auto") -> Checkup:
    """Runs a few steps, with a probe at the first that is skipped for each reason, with the weights of that step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        found = _checked(training, steps, policy)
    return replace(found, warned=list(dict.fromkeys(str(each.message) for each in caught)))


def _checked(training: Training, steps: int, policy: Any) -> Checkup:
    model, loss_fn = training.model, training.loss_fn
    optimizer = training.optimizer or torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scaler = LossScaler(model, policy, on_stuck="ignore")
    losses: list[float] = []
    scales: list[float] = []
    skipped: dict[int, str] = {}
    probes: dict[Status, tuple[int, ProbeReport]] = {}
    known: dict[str, Any] = {}
    good: Any = None
    weights = _sums(model)
    for index, batch in enumerate(_repeated(training.batches, steps), 1):
        loss = _loss(loss_fn(model, batch))
        losses.append(float(loss.detach()))
        scaler.backward(loss)
        if _sums(model) != weights:
            known.setdefault("written", index)
        result = scaler.step(optimizer)
        optimizer.zero_grad()
        weights = _sums(model)
        scales.append(float(result.next_scale))
        if not result.skipped():
            good = (batch,)
            continue
        skipped[index], status = _described(result), result.status()
        if status is not Status.NO_GRADS and status not in probes:
            probes[status] = index, scaler.probe(lambda batch=batch: loss_fn(model, batch))
            weights = _sums(model)
    if good is not None:
        known |= _zeros(lambda: loss_fn(model, good[0]), model, scales[-1])
    seen = replace(scaler._evidence(), **known)
    step, report = probes.get(Status.NONFINITE_LOSS) or probes.get(Status.OVERFLOW) or (None, None)
    health = health_of(seen if report is None else replace(seen, probed="The probe below shows the operation."))
    ended_well = health.condition in HEALTHY and len(losses) not in skipped
    # A loss that is not finite is a fault: no search for a scale explains it, however many steps were applied since.
    if ended_well and Status.NONFINITE_LOSS not in probes:
        step = report = None
    return Checkup(losses, scales, skipped, health, [], report, step)


def _repeated(batches: Iterable[Any], steps: int) -> Iterator[Any]:
    """Yields as many batches as there are steps, some of them again where there are fewer."""
    held = list(islice(batches, min(steps, MOST_BATCHES)))
    if not held:
        raise BadTarget("The function must return at least one batch. Received: none.")
    return islice(cycle(held), steps)


def _loss(loss: Any) -> Tensor:
    try:
        return check_loss(loss, "loss_fn")
    except TypeError as error:
        raise BadTarget(str(error)) from None


def _described(result: StepResult) -> str:
    culprits = result.culprits()
    named = ", ".join(f"{each.name} ({each.kind})" for each in culprits[:3])
    return f"{result.status()}{': ' if named else ''}{named}{', ...' if len(culprits) > 3 else ''}"


def _sums(model: nn.Module) -> list[str]:
    """Returns a number for each parameter that changes if someone writes to it. As text, where a NaN equals itself."""
    return [str(float(each.detach().float().sum())) for each in model.parameters() if not each.is_complex()]


def _zeros(step: Step, model: nn.Module, scale: float) -> Mapping[str, Any]:
    """Returns which gradients are zero at a scale and not in float32, and whether all are zero there too.

    By the names of `Evidence`; nothing where the model is not in float32. Two steps.
    """
    if any(each.dtype not in (torch.float32, torch.float64) for each in model.parameters()):
        return {}
    probed, zero, nonzero = Probe([model], None), dict[str, Tensor](), dict[str, Tensor]()
    probed.run(step, scale, use=lambda grads: zero.update({name: each.to_dense() == 0 for name, each in grads.items()}))
    with no_autocast(next(model.parameters()).device.type):
        probed.run(
            step, 1.0, use=lambda grads: nonzero.update({name: each.to_dense() != 0 for name, each in grads.items()})
        )
    shares = {name: float((zero[name] & each).float().mean()) for name, each in nonzero.items() if name in zero}
    lost = {name: share for name, share in shares.items() if share >= LOST_SHARE}
    any_is = any(bool(each.any()) for each in nonzero.values())
    return {"lost": dict(sorted(lost.items(), key=lambda item: -item[1])), "zero_in_float32": not any_is}
