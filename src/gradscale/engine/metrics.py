"""What a dashboard wants to know, where the state is on the host."""

import math
from typing import Protocol

from gradscale.formats import FP16
from gradscale.policies.contract import ScaleState


class Last(Protocol):
    """What is known of the last step, as its result has it."""

    @property
    def applied(self) -> bool:
        """Whether the step was applied."""
        ...

    @property
    def scale(self) -> float:
        """The scale that made its gradients."""
        ...

    @property
    def grad_norm(self) -> float | None:
        """The true norm of its gradients, if it was measured."""
        ...

    @property
    def amax(self) -> float | None:
        """Their largest magnitude, unscaled, if it was measured."""
        ...


def metrics_of(state: ScaleState, last: Last | None) -> dict[str, float]:
    """Returns scale, counts, skip rate, and the last step's true norm and headroom: NaN where there is none."""
    applied, skipped = float(state.applied), float(state.skipped)
    norm = None if last is None else last.grad_norm
    return {
        "scale": float(state.scale),
        "applied": applied,
        "skipped": skipped,
        "skip_rate": skipped / max(1.0, applied + skipped),
        "grad_norm": math.nan if norm is None else norm,
        "headroom_bits": _headroom_bits(last),
    }


def _headroom_bits(last: Last | None) -> float:
    if last is None or not last.applied or not last.amax:
        return math.nan
    return math.log2(FP16.max) - math.log2(last.amax) - math.log2(last.scale)
