"""Room five, remember: the last result, the metrics, and the watch for a run that skips every step."""

import math
import warnings
from collections.abc import Callable
from typing import Literal

from torch import Tensor

from gradscale.formats import FP16
from gradscale.state import ScaleState
from gradscale.torch.letter import Letter
from gradscale.torch.result import StepResult
from gradscale.torch.stuck import ScaleStuck, diagnose

OnStuck = Literal["raise", "warn"] | Callable[[ScaleStuck], None]

LOOK_EVERY = 16
"""Steps between two looks at the skip counter on an accelerator: seldom enough to cost nothing."""


class Memory:
    """What a scaler remembers of its steps, read late and off the hot path.

    Attributes:
        last: the result of the last step.
    """

    def __init__(self, max_consecutive_skips: int, on_stuck: OnStuck) -> None:
        if isinstance(max_consecutive_skips, bool) or not isinstance(max_consecutive_skips, int):
            raise TypeError(f"`max_consecutive_skips` must be an integer. Received: {max_consecutive_skips!r}.")
        if max_consecutive_skips < 1:
            raise ValueError(f"`max_consecutive_skips` must be at least 1. Received: {max_consecutive_skips!r}.")
        if on_stuck not in ("raise", "warn") and not callable(on_stuck):
            raise ValueError(f"`on_stuck` must be 'raise', 'warn' or a function. Received: on_stuck={on_stuck!r}.")
        self.last: StepResult | None = None
        self._max_consecutive_skips = max_consecutive_skips
        self._on_stuck = on_stuck
        self._steps = 0
        self._sent: Letter | None = None
        self._metrics: list[Letter] = []

    def keep(self, result: StepResult, state: ScaleState) -> None:
        """Keeps the result, and raises or warns if the run has been stuck for too long. Does not wait.

        On an accelerator the counters are looked at a few steps late.
        """
        self.last = result
        self._steps += 1
        if self._sent is None and (state.scale.is_cpu or self._steps % LOOK_EVERY == 0):
            self._sent = Letter(state.consecutive_skips, state.stuck, result.loss_finite)
        if self._sent is not None and self._sent.arrived:
            skips, stuck, loss_finite = self._sent.read()
            self._sent = None
            if skips >= self._max_consecutive_skips and (stuck or not loss_finite):
                self._report(diagnose(result, int(skips)))

    def metrics(self, state: ScaleState, amax: Tensor) -> dict[str, float]:
        """Returns the newest numbers known on the host, and sends for newer ones. Does not wait for the device."""
        norm = amax * math.nan if self.last is None or self.last.grad_norm is None else self.last.grad_norm
        self._metrics.append(Letter(state.scale, state.applied, state.skipped, norm, amax))
        while len(self._metrics) > 1 and self._metrics[1].arrived:
            self._metrics.pop(0)
        if not self._metrics[0].arrived:
            return {}
        scale, applied, skipped, norm_now, amax_now = self._metrics[0].read()
        return {
            "scale": scale,
            "applied": applied,
            "skipped": skipped,
            "skip_rate": skipped / max(1.0, applied + skipped),
            "grad_norm": norm_now,
            "headroom_bits": math.log2(FP16.max / (amax_now * scale)) if 0 < amax_now < math.inf else math.nan,
        }

    def _report(self, stuck: ScaleStuck) -> None:
        if self._on_stuck == "raise":
            raise stuck
        if self._on_stuck == "warn":
            warnings.warn(str(stuck), stacklevel=4)
        elif callable(self._on_stuck):
            self._on_stuck(stuck)
