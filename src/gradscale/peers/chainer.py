"""Chainer: `Optimizer.loss_scaling`, which doubles at each step until the first overflow, and then grows slowly."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradscale.peers._settings import Growth, Positive, check_fields, checked
from gradscale.policies.arithmetic import Namespace, bounded
from gradscale.policies.contract import ScaleState, Seen, counted
from gradscale.policies.static import Static
from gradscale.record import Array, Record, leaf

_LOWEST = 1.0
_HIGHEST = 65504.0
"""Chainer's bounds; the second is FP16's maximum."""


@dataclass(frozen=True, slots=True)
class SearchState(ScaleState):
    """State of a `ChainerScaling`.

    Attributes:
        overflowed: a step has overflowed, and the doubling is over.
    """

    overflowed: Array = leaf("bool", False)


@dataclass(frozen=True, slots=True, repr=False)
class ChainerScaling(Record):
    """The rule of Chainer's dynamic loss scaling, in Python floats between 1 and 65504.

    The scale starts from 1 and doubles with each step until the first overflow. From then on each clean step multiplies
    it by `growth_factor`. Any overflow halves it.

    Attributes:
        growth_factor: 2**(1 / interval), so that `interval` clean steps double the scale.
    """

    growth_factor: Growth

    needs: ClassVar[frozenset[str]] = frozenset({"finite", "loss_finite"})

    def __post_init__(self) -> None:
        check_fields(self)

    def start(self) -> SearchState:
        """Returns the state before the first step, with its scale in float64."""
        return SearchState(scale=np.float64(_LOWEST))

    def next(self, state: SearchState, seen: Seen, xp: Namespace) -> SearchState:
        """Returns the state after one step. `stuck` means that an overflow found the scale at 1."""
        overflow = xp.logical_not(seen.finite)
        overflowed = xp.logical_or(state.overflowed, overflow)
        raised = xp.where(overflowed, state.scale * self.growth_factor, state.scale * 2.0)
        moved = xp.where(overflow, state.scale * 0.5, raised)
        return counted(
            state,
            xp.logical_and(seen.finite, seen.loss_finite),
            xp,
            scale=bounded(moved, _LOWEST, _HIGHEST, xp),
            overflowed=overflowed,
            stuck=xp.logical_and(overflow, state.scale <= _LOWEST),
        )


@checked
def loss_scaling(interval: Positive = 1000, scale: Positive | None = None) -> ChainerScaling | Static:
    """Returns the rule that `Optimizer.loss_scaling` sets up: dynamic, or fixed where `scale` is given.

    With a fixed scale Chainer checks nothing; `Static` still skips a step that overflows.
    """
    if scale is not None:
        return Static(scale)
    if interval < 1:
        raise ValueError(f"`interval` must be at least 1. Received: interval={interval!r}.")
    return ChainerScaling(2.0 ** (1.0 / interval))


VARIANTS = {"Optimizer.loss_scaling": loss_scaling, "Optimizer": loss_scaling}
