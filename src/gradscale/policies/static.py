"""The policies whose scale never changes."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from gradscale.policies.arithmetic import Namespace
from gradscale.policies.checks import as_single, check_scale
from gradscale.policies.contract import Policy, ScaleState, Seen, counted, one_more, verdict
from gradscale.record import Record


@dataclass(frozen=True, slots=True, repr=False)
class NoScaling(Record):
    """Scale 1, nothing checked, every step applied: for a BF16 or FP32 run.

    >>> NoScaling().start().scale
    np.float32(1.0)
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    def start(self) -> ScaleState:
        """Returns the state before the first step."""
        return ScaleState(scale=np.float32(1))

    def next(self, state: ScaleState, seen: Seen, xp: Namespace) -> ScaleState:
        """Returns the state with one more step counted as applied. Reads nothing of `seen`."""
        del seen
        return replace(state, applied=one_more(state.applied, xp))


@dataclass(frozen=True, slots=True, repr=False)
class CheckOnly(Record):
    """Scale 1, and steps with non-finite gradients skipped: protects a BF16 or FP32 run, at the cost of the check.

    Nothing is multiplied or divided. One inf or NaN would otherwise stay in float32 weights, moments and averages.

    >>> state = CheckOnly().next(CheckOnly().start(), Seen(finite=np.bool_(False)), np)
    >>> float(state.scale), int(state.skipped)
    (1.0, 1)
    """

    needs: ClassVar[frozenset[str]] = frozenset({"finite", "loss_finite"})
    is_compiled: ClassVar[bool] = True
    min_scale: ClassVar[float] = 1.0
    max_scale: ClassVar[float] = 1.0

    def start(self) -> ScaleState:
        """Returns the state before the first step."""
        return ScaleState(scale=np.float32(1))

    def next(self, state: ScaleState, seen: Seen, xp: Namespace) -> ScaleState:
        """Returns the state with the step counted. Non-finite gradients set `stuck`: no lower scale would help."""
        return _counted(state, seen, xp)


@dataclass(frozen=True, slots=True, repr=False)
class Static(Record):
    """A scale that never changes. Overflow is still detected, skipped and counted.

    Attributes:
        scale: what the loss is multiplied by.
    """

    scale: float

    needs: ClassVar[frozenset[str]] = frozenset({"finite", "loss_finite"})
    is_compiled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_scale("scale", self.scale)
        object.__setattr__(self, "scale", as_single("scale", self.scale))

    def start(self) -> ScaleState:
        """Returns the state before the first step."""
        return ScaleState(scale=np.float32(self.scale))

    def next(self, state: ScaleState, seen: Seen, xp: Namespace) -> ScaleState:
        """Returns the state with the step counted. Any overflow sets `stuck`: a static scale cannot go lower."""
        return _counted(state, seen, xp)


def multiplies(policy: Policy) -> bool:
    """Returns whether a scaler with this policy multiplies losses and divides gradients at all."""
    return bool(policy.needs) and not isinstance(policy, CheckOnly)


def _counted(state: ScaleState, seen: Seen, xp: Namespace) -> ScaleState:
    """Returns the state of a scale that stays where it is, with the step counted."""
    clean, overflow = verdict(seen, xp)
    return counted(state, clean, xp, stuck=overflow)
