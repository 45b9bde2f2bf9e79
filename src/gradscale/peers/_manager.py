"""MindSpore's `DynamicLossScaleManager`: growth and backoff on the host, with a rule for giving up."""

from dataclasses import dataclass, replace
from typing import ClassVar

from gradscale.peers._settings import check_positive
from gradscale.peers.ladder import Ladder, LadderState
from gradscale.policies.arithmetic import Namespace
from gradscale.policies.checks import check_count
from gradscale.policies.contract import Seen
from gradscale.record import Record

_BAD_STEP_MAX = 1000


@dataclass(frozen=True, slots=True)
class MindsporeManager(Record):
    """The rule of `DynamicLossScaleManager`, which runs on the host: Python floats, down to 1.

    After more than 1000 overflows in a row the manager raises; there the state is `stuck`.

    Attributes:
        init_loss_scale: scale of the first step.
        scale_factor: multiplies the scale when it grows; its reciprocal, when it backs off.
        scale_window: clean steps before the scale grows.
    """

    init_loss_scale: float = 2.0**24
    scale_factor: float = 2.0
    scale_window: int = 2000

    needs: ClassVar[frozenset[str]] = Ladder.needs

    def __post_init__(self) -> None:
        check_positive("scale_factor", self.scale_factor)
        check_count("scale_window", self.scale_window)
        check_positive("init_loss_scale", self.init_loss_scale)
        if self.init_loss_scale < 1:
            raise ValueError(
                f"`init_loss_scale` must be at least 1. Received: init_loss_scale={self.init_loss_scale!r}."
            )

    def start(self) -> LadderState:
        """Returns the state before the first step, with its scale in float64."""
        return self._ladder().start()

    def next(self, state: LadderState, seen: Seen, xp: Namespace) -> LadderState:
        """Returns the state after one step. `stuck` says that the manager has given up."""
        moved = self._ladder().next(state, seen, xp)
        return replace(moved, stuck=moved.consecutive_skips > _BAD_STEP_MAX)

    def _ladder(self) -> Ladder:
        return Ladder(
            init_scale=self.init_loss_scale,
            growth_factor=self.scale_factor,
            backoff_factor=1 / self.scale_factor,
            growth_interval=self.scale_window,
            floor=1.0,
            arithmetic="float64",
        )
