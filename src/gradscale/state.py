"""The values that travel through a training step: what was seen, the scale's state, and what was decided."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from gradscale.record import Array, Record, leaf


class Status(StrEnum):
    """What became of a step, and why."""

    APPLIED = "applied"
    OVERFLOW = "overflow"
    NONFINITE_LOSS = "nonfinite_loss"
    NO_GRADS = "no_grads"

    @classmethod
    def of(cls, applied: Any, loss_finite: Any) -> "Status":
        """Returns what became of a step that had gradients. A loss that is not finite takes the blame for a skip."""
        if applied:
            return cls.APPLIED
        return cls.OVERFLOW if loss_finite else cls.NONFINITE_LOSS


@dataclass(frozen=True, slots=True)
class Seen:
    """What one read of the gradients found, in true units: divided by the scale already.

    A framework's adapter fills in what the policy's `needs` and the caller ask for; the rest keeps its default and is
    not looked at. Leaves are scalars, or vectors where many policies run at once.

    Attributes:
        finite: no gradient is inf or NaN, before or after unscaling.
        loss_finite: the loss itself was finite. No scale can mend one that was not.
        amax: largest magnitude of any gradient.
        norm: Euclidean norm over all gradients.
        upper_share: share of gradient elements above the edge that a `Histogram` policy watches.
    """

    finite: Array = np.bool_(True)
    loss_finite: Array = np.bool_(True)
    amax: Array = np.float32(0)
    norm: Array = np.float32(0)
    upper_share: Array = np.float32(0)


@dataclass(frozen=True, slots=True)
class ScaleState(Record):
    """Everything a scale remembers between two steps. A value: a step makes a new one.

    Attributes:
        scale: what the loss is multiplied by, and the gradients divided by.
        clean_steps: clean steps in a row that count towards the next growth.
        credits: overflows that will still be forgiven before one lowers the scale, plus one.
        applied: steps applied so far.
        skipped: steps skipped so far, for whatever reason.
        consecutive_skips: steps skipped since the last applied one.
        stuck: the last overflow asked for a lower scale, and there was none to go to.
    """

    scale: Array = leaf("float32")
    clean_steps: Array = leaf("int32", 0)
    credits: Array = leaf("int32", 1)
    applied: Array = leaf("int32", 0)
    skipped: Array = leaf("int32", 0)
    consecutive_skips: Array = leaf("int32", 0)
    stuck: Array = leaf("bool", False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the step shall do, decided once for every device, rank and optimizer that shares the scale.

    Attributes:
        state: the scale's state for the next step.
        applied: the gate. True applies the update, False leaves weights and optimizer state as they are.
        factor: what every gradient is multiplied by before the update: unscaling and clipping in one number. Zero
            where the step is skipped.
    """

    state: ScaleState
    applied: Array
    factor: Array
