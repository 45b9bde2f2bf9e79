"""The rules that move a scale: the contract every policy keeps, and the three that need no statistics."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np

from gradscale.arithmetic import Namespace, bounded, larger, smaller
from gradscale.record import Array, Record
from gradscale.state import ScaleState, Seen

S = TypeVar("S", bound=ScaleState)

LOWEST_SCALE = 2.0**-126
HIGHEST_SCALE = 2.0**126
"""Bounds of every scale. Both ends and their reciprocals are normal float32 numbers, which no device flushes to 0."""


class Policy(Protocol):
    """A rule for the scale: two pure methods over frozen values.

    `next` never branches on a value, mutates or waits for a device. It runs on whichever framework's arrays it is
    given, on scalars or on vectors of states, and with settings that are numbers or vectors themselves.
    """

    needs: ClassVar[frozenset[str]]
    """Names of the `Seen` fields that `next` reads. An adapter measures these and no others."""

    def start(self) -> Any:
        """Returns the state before the first step, with numpy leaves."""
        ...

    def next(self, state: Any, seen: Seen, xp: Namespace) -> Any:
        """Returns the state after a step that looked like `seen`."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as a plain dict."""
        ...


def counted(state: S, applied: Array, xp: Namespace, **changes: Array) -> S:
    """Returns `state` with `changes`, and with the step counted as applied or skipped."""
    return replace(
        state,
        applied=xp.where(applied, state.applied + 1, state.applied),
        skipped=xp.where(applied, state.skipped, state.skipped + 1),
        consecutive_skips=xp.where(applied, 0, state.consecutive_skips + 1),
        **changes,
    )


def verdict(seen: Seen, xp: Namespace) -> tuple[Array, Array]:
    """Returns (clean, overflow). Both are False when the loss was not finite: then no scale is to blame."""
    clean = xp.logical_and(seen.finite, seen.loss_finite)
    overflow = xp.logical_and(xp.logical_not(seen.finite), seen.loss_finite)
    return clean, overflow


def backed_off(policy: Policy, state: S, overflow: Seen, xp: Namespace) -> S:
    """Returns `state` after one backoff that hysteresis cannot forgive and no counter sees: for running a step again.

    Args:
        policy: the rule.
        state: the state whose scale overflowed.
        overflow: a `Seen` with finite=False and loss_finite=True, in the framework's own arrays.
        xp: the framework's array module.
    """
    lowered = policy.next(replace(state, credits=state.credits * 0 + 1), overflow, xp)
    return replace(
        lowered,
        credits=state.credits,
        applied=state.applied,
        skipped=state.skipped,
        consecutive_skips=state.consecutive_skips,
    )


@dataclass(frozen=True, slots=True)
class NoScaling(Record):
    """Scale 1, nothing checked, every step applied: what a BF16 or FP32 run wants.

    >>> NoScaling().start().scale
    np.float32(1.0)
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    def start(self) -> ScaleState:
        """Returns the state before the first step."""
        return ScaleState(scale=np.float32(1))

    def next(self, state: ScaleState, seen: Seen, xp: Namespace) -> ScaleState:
        """Returns the state with one more step counted as applied. Reads nothing of `seen`."""
        del seen, xp
        return replace(state, applied=state.applied + 1)


@dataclass(frozen=True, slots=True)
class Static(Record):
    """A scale that never moves. Overflow is still detected, skipped and counted.

    Attributes:
        scale: what the loss is multiplied by.
    """

    scale: float

    needs: ClassVar[frozenset[str]] = frozenset({"finite", "loss_finite"})

    def __post_init__(self) -> None:
        check_scale("scale", self.scale)
        object.__setattr__(self, "scale", as_single("scale", self.scale))

    def start(self) -> ScaleState:
        """Returns the state before the first step."""
        return ScaleState(scale=np.float32(self.scale))

    def next(self, state: ScaleState, seen: Seen, xp: Namespace) -> ScaleState:
        """Returns the state with the step counted. Any overflow is `stuck`: a static scale has nowhere to go."""
        clean, overflow = verdict(seen, xp)
        return counted(state, clean, xp, stuck=overflow)


@dataclass(frozen=True, slots=True)
class Dynamic(Record):
    """Grows the scale after a run of clean steps and backs off when a step overflows, always within bounds.

    Attributes:
        init_scale: scale of the first step.
        growth_factor: what the scale is multiplied by when it grows.
        backoff_factor: what the scale is multiplied by when it backs off.
        growth_interval: clean steps in a row before the scale grows.
        hysteresis: overflows it takes to back off for the first time. Further ones back off at once, until a refill.
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
        for name in ("growth_interval", "hysteresis"):
            check_count(name, getattr(self, name))
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.refill not in ("growth", "clean"):
            raise ValueError(f"`refill` must be 'growth' or 'clean'. Received: refill={self.refill!r}.")

    def start(self) -> ScaleState:
        """Returns the state before the first step."""
        return ScaleState(scale=np.float32(self.init_scale), credits=np.int32(self.hysteresis))

    def next(self, state: ScaleState, seen: Seen, xp: Namespace) -> ScaleState:
        """Returns the state after one step.

        A non-finite step spends a hysteresis credit and, with none left, multiplies the scale by `backoff_factor`.
        The `growth_interval`-th clean step in a row multiplies it by `growth_factor`. A non-finite loss changes
        nothing but the counters. Does not wait for the device.
        """
        clean, overflow = verdict(seen, xp)
        clean_steps = xp.where(clean, state.clean_steps + 1, xp.where(overflow, 0, state.clean_steps))
        grows = xp.logical_and(clean, clean_steps >= self.growth_interval)
        left = xp.where(overflow, larger(state.credits - 1, 0, xp), state.credits)
        backs_off = xp.logical_and(overflow, left <= 0)
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
        # The limit is twice what would do, so that its own rounding cannot keep the scale a hair below `max_scale`.
        grown = smaller(scale, self.max_scale * 2.0 / self.growth_factor, xp) * self.growth_factor
        moved = xp.where(grows, grown, xp.where(backs_off, scale * self.backoff_factor, scale))
        return bounded(moved, self.min_scale, self.max_scale, xp)


def check_policy(policy: Any) -> None:
    """Raises if `policy` is not a policy that a scaler can run, or is the class of one."""
    if isinstance(policy, type) or not callable(getattr(policy, "next", None)):
        raise TypeError(f"`policy` must be a policy, such as `Dynamic()`. Received: policy={policy!r}.")
    if "upper_share" in policy.needs and not hasattr(policy, "edge_magnitude"):
        raise TypeError(
            "A policy that needs `upper_share` must say above which edge, as `Histogram.edge_magnitude` does. "
            f"Received: policy={policy!r}."
        )


def check_number(name: str, value: float) -> None:
    """Raises if `value` is not a real number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"`{name}` must be a number. Received: {name}={value!r} ({type(value).__name__}).")


def as_single(name: str, value: float) -> float:
    """Returns `value` rounded to float32, or infinity where it is too large; raises if it is not a number.

    Every framework holds the settings in float32. Rounded once, here, they mean the same on all of them and in a
    product of two settings, which Python would otherwise work out in float64.
    """
    check_number(name, value)
    with np.errstate(over="ignore"):
        return float(np.float32(max(min(value, 2.0**128), -(2.0**128))))


def check_scale(name: str, value: float) -> None:
    """Raises if `value` cannot be a scale."""
    check_number(name, value)
    if not LOWEST_SCALE <= value <= HIGHEST_SCALE:
        raise ValueError(
            f"`{name}` must lie between 2**-126 and 2**126, where it and its reciprocal are normal float32 numbers. "
            f"Received: {name}={value!r}."
        )


def check_count(name: str, value: int) -> None:
    """Raises if `value` is not an integer from 1 to the largest int32."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r} ({type(value).__name__}).")
    if not 1 <= value <= np.iinfo(np.int32).max:
        raise ValueError(f"`{name}` must be between 1 and 2**31 - 1. Received: {name}={value!r}.")


def check_bounds(policy: Any) -> None:
    """Raises unless `min_scale <= init_scale <= max_scale`; rounds the bounds inwards to float32.

    A bound that float32 cannot hold would be rounded by the framework, possibly outwards, and the scale could then
    stand a hair outside the bounds the user gave.
    """
    for name in ("init_scale", "min_scale", "max_scale"):
        check_scale(name, getattr(policy, name))
    if not policy.min_scale <= policy.init_scale <= policy.max_scale:
        raise ValueError(
            "`init_scale` must lie between `min_scale` and `max_scale`. Received: "
            f"min_scale={policy.min_scale!r}, init_scale={policy.init_scale!r}, max_scale={policy.max_scale!r}."
        )
    low = np.float32(policy.min_scale)
    high = np.float32(policy.max_scale)
    low = np.nextafter(low, np.float32(np.inf)) if float(low) < policy.min_scale else low
    high = np.nextafter(high, np.float32(0)) if float(high) > policy.max_scale else high
    if low > high:
        raise ValueError(
            "There must be a float32 number between `min_scale` and `max_scale`. Received: "
            f"min_scale={policy.min_scale!r}, max_scale={policy.max_scale!r}."
        )
    object.__setattr__(policy, "min_scale", float(low))
    object.__setattr__(policy, "max_scale", float(high))
    object.__setattr__(policy, "init_scale", float(np.clip(np.float32(policy.init_scale), low, high)))
