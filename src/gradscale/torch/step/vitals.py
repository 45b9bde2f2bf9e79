"""What is known of a run, for a look at its health."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.engine.health import Vitals
from gradscale.engine.result import Status
from gradscale.formats import FP16
from gradscale.torch.step.gradients import parameters_of
from gradscale.torch.step.result import StepResult
from gradscale.torch.step.weights import WeightSizes

Optimizer = torch.optim.Optimizer


def vitals(
    last: StepResult | None,
    state: Any,
    optimizers: Sequence[Optimizer],
    weights: WeightSizes,
    amax: Tensor | None,
    counted: tuple[int, int],
) -> Vitals:
    """Returns what is known of a run after its last step. Synchronizes with the device.

    Args:
        last: the result of that step; None before the first.
        state: the state of the scale after it.
        optimizers: those it has updated.
        weights: the sizes of their weights.
        amax: the largest gradient that was measured last, unscaled.
        counted: applied and skipped steps at the last look.
    """
    applied, skipped = int(state.applied), int(state.skipped)
    scale = float(state.scale)
    if last is None:
        return Vitals(scale, applied, skipped)
    status = last.status()
    return Vitals(
        scale,
        applied,
        skipped,
        int(state.consecutive_skips),
        bool(state.stuck),
        (applied - counted[0], skipped - counted[1]),
        status,
        _headroom_bits(amax, scale),
        () if status is Status.APPLIED else last.culprits(),
        last.parameters,
        _without_gradients(last, optimizers),
        weights.now(optimizers, last.parameter_names),
    )


def _headroom_bits(amax: Tensor | None, scale: float) -> float:
    """Returns how often the scale could double; inf if all gradients are zero, NaN if they are not known."""
    if amax is None or not math.isfinite(largest := float(amax) * scale):
        return math.nan
    return math.log2(FP16.max / largest) if largest else math.inf


def _without_gradients(last: StepResult, optimizers: Sequence[Optimizer]) -> list[str]:
    """Returns the names of frozen parameters, if some had no gradient; where none is frozen, how many had none."""
    parameters = list(dict.fromkeys(parameters_of(optimizers)))
    missing = len(parameters) - last.parameters
    if not last.parameters or missing <= 0:
        return []
    frozen = last.parameter_names.of([each for each in parameters if not each.requires_grad], optimizers)
    return frozen if len(frozen) == missing else [*frozen, *["(unused)"] * (missing - len(frozen))]
