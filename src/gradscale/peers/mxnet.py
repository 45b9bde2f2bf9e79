"""MXNet: `mxnet.amp.LossScaler`, whose every change takes effect one step late."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np

from gradscale.peers._settings import Count, Positive, check_fields
from gradscale.peers.ladder import Ladder, LadderState
from gradscale.policies.arithmetic import Namespace
from gradscale.policies.contract import ScaleState, Seen
from gradscale.record import Array, Record, leaf


@dataclass(frozen=True, slots=True)
class LaggingState(LadderState):
    """State of an `MxnetLossScaler`. Its `scale` is what MXNet keeps as `_next_loss_scale`.

    Attributes:
        public_scale: MXNet's `loss_scale`, which lags by a step: what it multiplies the next loss by.
    """

    public_scale: Array = leaf("float32", 1)


@dataclass(frozen=True, slots=True, repr=False)
class MxnetLossScaler(Record):
    """The rule of `mxnet.amp.LossScaler`: doubles and halves a Python float, up to a ceiling and down to zero.

    MXNet decides on a new scale after each step but uses it only after the step that follows. The decisions are
    `state.scale`, which has no lag; `state.public_scale` is what an MXNet run multiplies its losses by.

    Attributes:
        loss_scale: scale of the first step.
        scale_seq_len: clean steps before the scale grows.
        max_loss_scale: a growth never ends above.
    """

    loss_scale: Positive = 2.0**16
    scale_seq_len: Count = 2000
    max_loss_scale: Positive = 2.0**24

    needs: ClassVar[frozenset[str]] = Ladder.needs

    def __post_init__(self) -> None:
        check_fields(self)

    def start(self) -> LaggingState:
        """Returns the state before the first step, with scales in float64."""
        scale = np.float64(self.loss_scale)
        return LaggingState(scale=scale, public_scale=scale)

    def next(self, state: LaggingState, seen: Seen, xp: Namespace) -> LaggingState:
        """Returns the state after one step. `stuck` means that an overflow could not lower the scale."""
        bounds: dict[str, Any] = {"growth_interval": self.scale_seq_len, "ceiling": self.max_loss_scale}
        ladder = Ladder(self.loss_scale, arithmetic="float64", **bounds)
        # MXNet's `has_overflow` copies `_next_loss_scale` to `loss_scale` before it computes the next one.
        decided: ScaleState = ladder.next(state, seen, xp)
        return cast("LaggingState", replace(decided, public_scale=state.scale))


VARIANTS = {"LossScaler": MxnetLossScaler}
