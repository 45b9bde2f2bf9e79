"""The classic rule: the scale grows after a number of clean steps, and backs off when one overflows."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from gradscale.policies.arithmetic import Namespace, bounded, larger, smaller
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE, as_single, check_bounds, check_counts
from gradscale.policies.contract import ScaleState, Seen, counted, one_more, verdict
from gradscale.record import Array, Record


@dataclass(frozen=True, slots=True, repr=False)
class Dynamic(Record):
    """Grows the scale after a number of clean steps and backs off when a step overflows, always within bounds.

    Attributes:
        init_scale: scale of the first step.
        growth_factor: what the scale is multiplied by when it grows.
        backoff_factor: what the scale is multiplied by when it backs off.
        growth_interval: clean steps in a row before the scale grows.
        hysteresis: overflows before the first backoff. Further ones back off at once, until a refill.
        refill: what restores the hysteresis credits: the next `"growth"`, or any `"clean"` step.
        min_scale: the scale never falls below.
        max_scale: the scale never rises above.

    >>> policy = Dynamic(init_scale=1024, growth_interval=2)
    >>> state = policy.start()
    >>> for finite in (True, True, False):
    ...     state = policy.next(state, Seen(finite=np.bool_(finite)), np)
    ...     print(float(state.scale))
    1024.0
    2048.0
    1024.0
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    refill: Literal["growth", "clean"] = "growth"
    min_scale: float = 1.0
    max_scale: float = HIGHEST_SCALE

    needs: ClassVar[frozenset[str]] = frozenset({"finite", "loss_finite"})
    is_compiled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self)
        growth_factor = as_single("growth_factor", self.growth_factor)
        backoff_factor = as_single("backoff_factor", self.backoff_factor)
        if not 1 < growth_factor < math.inf:
            raise ValueError(
                "`growth_factor` must be greater than 1 and finite, as a float32, so that the scale can grow. "
                f"Received: growth_factor={self.growth_factor!r}. For a fixed scale use `Static`."
            )
        if not 0 < backoff_factor < 1:
            raise ValueError(
                "`backoff_factor` must be between 0 and 1, as a float32, so that an overflow lowers the scale. "
                f"Received: backoff_factor={self.backoff_factor!r}. For a fixed scale use `Static`."
            )
        object.__setattr__(self, "growth_factor", growth_factor)
        object.__setattr__(self, "backoff_factor", backoff_factor)
        check_counts(self, "growth_interval", "hysteresis")
        if self.refill not in ("growth", "clean"):
            raise ValueError(f"`refill` must be 'growth' or 'clean'. Received: refill={self.refill!r}.")

    def start(self) -> ScaleState:
        """Returns the state before the first step."""
        return ScaleState(scale=np.float32(self.init_scale), credits=np.int32(self.hysteresis))

    def next(self, state: ScaleState, seen: Seen, xp: Namespace) -> ScaleState:
        """Returns the state after one step.

        A non-finite step spends a hysteresis credit and, with none left, multiplies the scale by `backoff_factor`.
        The `growth_interval`-th clean step in a row multiplies it by `growth_factor`. A non-finite loss changes
        nothing but the counters. Does not synchronize with the device.
        """
        clean, overflow = verdict(seen, xp)
        clean_steps = xp.where(clean, one_more(state.clean_steps, xp), xp.where(overflow, 0, state.clean_steps))
        # `>=`, not `==`: a counter that was saved under a longer interval may be past this one already.
        grows = xp.logical_and(clean, clean_steps >= self.growth_interval)
        left = xp.where(overflow, larger(state.credits - 1, 0, xp), state.credits)
        backs_off = xp.logical_and(overflow, left <= 0)
        # A Python `if` on a setting, which is static; a value is never branched on.
        refills = grows if self.refill == "growth" else clean
        return counted(
            state,
            clean,
            xp,
            scale=self._moved(state.scale, grows, backs_off, xp),
            clean_steps=xp.where(grows, 0, clean_steps),
            credits=xp.where(refills, self.hysteresis, left),
            stuck=xp.logical_and(backs_off, state.scale <= self.min_scale),
        )

    def _moved(self, scale: Array, grows: Array, backs_off: Array, xp: Namespace) -> Array:
        """Returns the scale after growth or backoff, within the bounds; never computes a product that overflows."""
        # Twice the limit that is needed, so that its own rounding cannot keep the scale slightly below `max_scale`.
        # Plus the lowest scale, as float32 loses the digits of a limit below it. Times the factor it is at most 4.
        limit = self.max_scale * 2.0 / self.growth_factor + LOWEST_SCALE
        grown = smaller(scale, limit, xp) * self.growth_factor
        moved = xp.where(grows, grown, xp.where(backs_off, scale * self.backoff_factor, scale))
        return bounded(moved, self.min_scale, self.max_scale, xp)
