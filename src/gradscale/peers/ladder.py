"""The growth-and-backoff rule as other systems have it, with their off-by-ones, missing bounds and arithmetic."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, ParamSpec

import numpy as np

from gradscale.policies.arithmetic import Namespace, larger, smaller
from gradscale.policies.contract import ScaleState, Seen, counted, one_more
from gradscale.record import Array, Record, leaf

P = ParamSpec("P")

NO_LIMIT = -(2**31) + 1
"""`fewest_credits` of a system whose credits fall below zero without end: one less is still an int32."""

_SMALLEST_NORMAL = 2.0**-126
"""Of float32."""


@dataclass(frozen=True, slots=True)
class LadderState(ScaleState):
    """State of a `Ladder`: both counters may fall below zero, as they do in some systems."""

    clean_steps: Array = leaf("int32", 0, signed=True)
    credits: Array = leaf("int32", 1, signed=True)


@dataclass(frozen=True, slots=True, repr=False)
class Ladder(Record):
    """Another system's growth-and-backoff rule, bit-exact. It has the bounds that system has, or none.

    Attributes:
        init_scale: scale of the first step.
        growth_factor: multiplies the scale when it grows.
        backoff_factor: multiplies the scale when it backs off.
        backoff_divisor: divides the scale when it backs off; for systems that divide.
        growth_interval: clean steps before the scale grows.
        late: clean steps that do not count, at the start and after each overflow.
        overshoot: whether a counter already past `growth_interval` still grows the scale, or only one equal to it.
        hysteresis: overflows before the first backoff.
        refill: what restores the hysteresis credits.
        fewest_credits: where the credits stop counting down.
        floor: a backoff never ends below.
        ceiling: a growth never ends above.
        refuses_inf: whether the scale stays as it is where growth would make it infinite.
        init_clean_steps: clean steps counted before the first.
        arithmetic: `"float32"` tensors, Python's `"float64"`, or `"mixed"`: a float32 scale times a double factor.
        most_skips: skipped steps in a row after which the system stops the run. Where it has such a limit, a scale that
            cannot go lower is not `stuck` before.
        flushes: whether a backoff below the normal float32 numbers ends at zero, as with JAX and TensorFlow on a CPU.
    """

    init_scale: float
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    backoff_divisor: float = 1.0
    growth_interval: int = 2000
    late: int = 0
    overshoot: bool = False
    hysteresis: int = 1
    refill: Literal["growth", "clean", "clean or backoff"] = "growth"
    fewest_credits: int = 1
    floor: float = 0.0
    ceiling: float = math.inf
    refuses_inf: bool = False
    init_clean_steps: int = 0
    arithmetic: Literal["float32", "float64", "mixed"] = "float32"
    flushes: bool = False
    most_skips: int | None = None

    needs: ClassVar[frozenset[str]] = frozenset({"finite", "loss_finite"})

    def __post_init__(self) -> None:
        """Raises if a counter of the state would not fit int32."""
        counters = {"hysteresis": self.hysteresis, "init_clean_steps - late": self.init_clean_steps - self.late}
        for name, value in counters.items():
            if not -(2**31) <= value < 2**31:
                raise ValueError(f"`{name}` must fit int32. Received: {value}. Use one between -2**31 and 2**31 - 1.")

    @property
    def backoff(self) -> float:
        """What a backoff multiplies the scale by, whether the system multiplies or divides."""
        return self.backoff_factor / self.backoff_divisor

    def start(self) -> LadderState:
        """Returns the state before the first step. Its scale is a float64 where the system keeps a Python float."""
        number = np.float64 if self.arithmetic == "float64" else np.float32
        return LadderState(
            scale=number(self.init_scale),
            clean_steps=np.int32(self.init_clean_steps - self.late),
            credits=np.int32(self.hysteresis),
        )

    @np.errstate(over="ignore")
    def next(self, state: LadderState, seen: Seen, xp: Namespace) -> LadderState:
        """Returns the state after one step. `stuck` means that an overflow could not move the scale.

        Gradients alone move the scale: none of these systems sees the loss.
        """
        clean, overflow = seen.finite, xp.logical_not(seen.finite)
        # A negative counter is a step that does not count, so a late start needs no state of its own.
        clean_steps = xp.where(clean, one_more(state.clean_steps, xp), -self.late)
        reached = clean_steps >= self.growth_interval if self.overshoot else clean_steps == self.growth_interval
        grows = xp.logical_and(clean, reached)
        left = xp.where(overflow, larger(state.credits - 1, self.fewest_credits, xp), state.credits)
        # The credits before this overflow: the last one is kept by systems that stop at 1, and is spent by the others.
        backs_off = xp.logical_and(overflow, state.credits <= 1)
        lowered = self._lowered(state.scale, xp)
        stuck = xp.logical_and(backs_off, lowered == state.scale)
        applied = xp.logical_and(clean, seen.loss_finite)
        if self.most_skips is not None:
            stuck = xp.logical_and(xp.logical_not(applied), state.consecutive_skips >= self.most_skips)
        return counted(
            state,
            applied,
            xp,
            scale=xp.where(grows, self._grown(state.scale, xp), xp.where(backs_off, lowered, state.scale)),
            clean_steps=xp.where(grows, 0, clean_steps),
            credits=xp.where(self._refills(clean, grows, backs_off, xp), self.hysteresis, left),
            stuck=stuck,
        )

    def _grown(self, scale: Array, xp: Namespace) -> Array:
        grown = self._times(scale, self.growth_factor, xp)
        if self.refuses_inf:
            grown = xp.where(xp.isfinite(grown), grown, scale)
        return smaller(grown, self.ceiling, xp)

    def _lowered(self, scale: Array, xp: Namespace) -> Array:
        # Both, with one of them 1: x * (1 / 3) and x / 3 differ in the last bit.
        lowered = self._times(scale, self.backoff_factor, xp) / self.backoff_divisor
        if self.flushes:
            lowered = xp.where(lowered < _SMALLEST_NORMAL, 0.0, lowered)
        return larger(lowered, self.floor, xp)

    def _refills(self, clean: Array, grows: Array, backs_off: Array, xp: Namespace) -> Array:
        if self.refill == "growth":
            return grows
        return clean if self.refill == "clean" else xp.logical_or(clean, backs_off)

    def _times(self, scale: Array, factor: Array, xp: Namespace) -> Array:
        """Returns the product as the system rounds it."""
        # torch's kernel multiplies a float32 scale by a double factor, and rounds the product once, to float32. With a
        # power of two that is the product in float32, for devices that have no double precision.
        if self.arithmetic != "mixed" or (isinstance(factor, float) and _is_power_of_two(factor)):
            return scale * factor
        return xp.asarray(xp.asarray(scale, dtype=xp.float64) * factor, dtype=xp.float32)  # pyright: ignore


def one_factor_ladder(init_scale: float, factor: float, growth_interval: int, **settings: Any) -> Ladder:
    """Returns a ladder that multiplies by `factor` to grow and divides by it to back off."""
    return Ladder(
        init_scale=init_scale,
        growth_factor=factor,
        backoff_factor=1.0,
        backoff_divisor=factor,
        growth_interval=growth_interval,
        **settings,
    )


def in_graph(rule: Callable[P, Ladder], **fixed: Any) -> Callable[P, Ladder]:
    """Returns `rule`, which makes a `one_factor_ladder`, for graph compilers: multiplied by 1 / factor, not divided.

    Its ladders have the `fixed` settings.
    """

    @functools.wraps(rule)
    def compiled(*args: P.args, **kwargs: P.kwargs) -> Ladder:
        ladder = rule(*args, **kwargs)
        # XLA and TensorFlow's graph optimizer replace a division by a constant. The last bit differs, and only for a
        # factor that is not a power of two.
        if not 2.0**-126 <= ladder.backoff_divisor <= 2.0**126:
            raise ValueError(
                "The factor by which a compiled rule backs off must lie between 2**-126 and 2**126, so that float32 "
                f"holds 1 / factor in full precision. Received: {ladder.backoff_divisor!r}."
            )
        reciprocal = float(np.float32(1) / np.float32(ladder.backoff_divisor))
        return replace(ladder, backoff_factor=reciprocal, backoff_divisor=1.0, **fixed)

    return compiled


def kernel_ladder(
    init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int, **settings: Any
) -> Ladder:
    """Returns the rule of `torch._amp_update_scale_`, and of apex's kernel like it: float32 times a double factor."""
    # The kernel tests `successful == growth_interval` (no overshoot), and drops a grown scale that is not finite.
    exact = _is_power_of_two(growth_factor) and _is_power_of_two(backoff_factor)
    return Ladder(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        refuses_inf=True,
        arithmetic="float32" if exact else "mixed",
        **settings,
    )


def _is_power_of_two(value: float) -> bool:
    """Returns whether `value` is a power of two that float32 holds in full precision."""
    return math.frexp(value)[0] == 0.5 and 2.0**-126 <= value <= 2.0**127
