"""The result of a step, the same on every adapter."""

from enum import StrEnum
from typing import Any


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
