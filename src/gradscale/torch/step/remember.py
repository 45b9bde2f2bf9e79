"""Room five, remember: the last result, the metrics, and the watch for a run that skips every step."""

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from gradscale.engine.stuck import ScaleStuck, likely_cause
from gradscale.formats import FP16
from gradscale.policies.contract import ScaleState
from gradscale.torch.step.host_copy import Letter
from gradscale.torch.step.result import StepResult

OnStuck = Literal["raise", "warn"] | Callable[[ScaleStuck], None]

LOOK_EVERY = 16
"""Steps between two looks at what nobody waits for, the skip counter or the headroom: seldom enough to cost nothing."""


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
        self._max_consecutive_skips = max_consecutive_skips
        self._on_stuck = on_stuck
        self.forget()

    def __reduce__(self) -> tuple[type["Memory"], tuple[Any, ...]]:
        """A copy starts afresh: results are about gradients of the original."""
        return Memory, (self._max_consecutive_skips, self._on_stuck)

    def forget(self) -> None:
        """Forgets every step, as at the start."""
        self.last: StepResult | None = None
        self._amax: Tensor | None = None
        self._steps = 0
        self._sent: Letter | None = None
        self._told = False
        self._sent_metrics: Letter | None = None
        self._metrics: dict[str, float] = {}

    @property
    def wants_amax(self) -> bool:
        """Whether the next step shall measure its largest gradient for the metrics."""
        return self._steps % LOOK_EVERY == 0

    def keep(self, result: StepResult, state: ScaleState, amax: Tensor | None) -> None:
        """Keeps the result, and raises or warns if the run has been stuck for too long. Does not wait.

        On an accelerator the counters are looked at a few steps late. Where `amax` is None, the last one is kept.
        """
        self.last = result
        self._amax = self._amax if amax is None else amax
        self._steps += 1
        if not isinstance(state.scale, Tensor):
            self._watch(result, int(state.consecutive_skips), lambda: state.stuck or not result.loss_finite)
            return
        if self._sent is None and self._steps % LOOK_EVERY == 0:
            self._sent = Letter(state.consecutive_skips, state.stuck, result.loss_finite)
        if self._sent is not None and self._sent.arrived:
            skips, stuck, loss_finite = self._sent.read()
            self._sent = None
            self._watch(result, int(skips), lambda: stuck or not loss_finite)

    def _watch(self, result: StepResult, skips: int, is_stuck: Callable[[], Any]) -> None:
        if skips < self._max_consecutive_skips:
            self._told = False
        elif is_stuck():
            self._report(result, skips)

    def metrics(self, state: ScaleState) -> dict[str, float]:
        """Returns the newest numbers known on the host, and sends for newer ones. Does not wait for the device."""
        self._receive_metrics()
        if self._sent_metrics is None:
            self._sent_metrics = self._metrics_of(state)
            self._receive_metrics()
        return dict(self._metrics)

    def _metrics_of(self, state: ScaleState) -> Letter:
        # The host's numbers stay there, whatever torch's default device is.
        device = state.scale.device if isinstance(state.scale, Tensor) else "cpu"
        scale, applied, skipped = (
            torch.as_tensor(leaf, device=device) for leaf in (state.scale, state.applied, state.skipped)
        )
        unknown = torch.full_like(scale, math.nan)
        norm = unknown if self.last is None or self.last.grad_norm is None else self.last.grad_norm
        amax = unknown if self._amax is None else self._amax
        return Letter(scale, applied, skipped, norm, torch.as_tensor(amax, device=device))

    def _receive_metrics(self) -> None:
        if self._sent_metrics is not None and self._sent_metrics.arrived:
            self._metrics = _as_metrics(self._sent_metrics)
            self._sent_metrics = None

    def _report(self, result: StepResult, skips: int) -> None:
        """Tells of a stuck run: by an error at every step, otherwise once until a step is applied again."""
        if self._on_stuck == "raise":
            raise _diagnosis(result, skips)
        if self._told:
            return
        self._told = True
        if self._on_stuck == "warn":
            warnings.warn(str(_diagnosis(result, skips)), stacklevel=6)
        elif callable(self._on_stuck):
            self._on_stuck(_diagnosis(result, skips))


def _diagnosis(result: StepResult, skips: int) -> ScaleStuck:
    """Returns the error that describes a stuck run from its last step. Waits for the device."""
    culprits = result.culprits()
    cause = likely_cause(result.status, culprits, result.parameters)
    return ScaleStuck(skips, float(result.next_scale), culprits, cause)


def _as_metrics(letter: Letter) -> dict[str, float]:
    scale, applied, skipped, norm, amax = letter.read()
    return {
        "scale": scale,
        "applied": applied,
        "skipped": skipped,
        "skip_rate": skipped / max(1.0, applied + skipped),
        "grad_norm": norm,
        "headroom_bits": math.log2(FP16.max / (amax * scale)) if 0 < amax * scale < math.inf else math.nan,
    }
