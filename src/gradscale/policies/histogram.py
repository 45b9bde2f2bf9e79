"""The scale that keeps the share of gradients above an edge small."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradscale.policies.arithmetic import Namespace, bounded, pow2_floor, smaller
from gradscale.policies.checks import (
    FORMAT_FP16,
    HIGHEST_SCALE,
    USELESS_SCALE,
    FormatField,
    check_bounds,
    check_counts,
    check_format,
    check_share,
)
from gradscale.policies.contract import ScaleState, Seen, counted, one_more, verdict
from gradscale.record import Array, Record, leaf

LONGEST_WAIT = 2**30
"""Largest `longest_wait`: `retry_interval * 2` still fits int32."""


@dataclass(frozen=True, slots=True)
class HistogramState(ScaleState):
    """State of `Histogram`. Its `clean_steps` are those with few gradients above the edge.

    Attributes:
        failed_scale: the last scale that was too high; 0 once that is forgotten.
        retry_interval: clean steps before a scale that failed is tried again.
    """

    failed_scale: Array = leaf("float32", 0)
    retry_interval: Array = leaf("int32", 1)


@dataclass(frozen=True, slots=True, repr=False)
class Histogram(Record):
    """Keeps the share of gradients above an edge small, so that the scale falls before a step overflows.

    It follows one number, `seen.upper_share`: the share of all gradient elements whose *scaled* magnitude is above
    `edge * format.max`, which is `edge_magnitude`. A share above `threshold` halves the scale; `period` clean steps in
    a row below it double the scale. An overflow is at least `1 / edge` above the edge, and lowers the scale by that
    factor, rounded to a power of two.

    The idea is PopART's, whose own rule is `gradscale.preset("popart")`. That one changes at every period, and so
    oscillates. Here, the interval before a scale that failed is tried again doubles each time it fails again, up to
    `longest_wait`; growth below it takes a period each. A scale that then holds for as long no longer counts as failed.

    Scales are bit-exact on every framework, and are powers of two if `init_scale` and the bounds are.

    Attributes:
        format: the format that the gradients must fit, or its name, such as `"fp16"`.
        init_scale: scale of the first step.
        edge: what share of the format's maximum the edge is.
        threshold: share of the elements that may be above the edge. With fewer than 10 million elements, 1e-7 means
            none.
        period: clean steps before the scale doubles.
        longest_wait: most clean steps before a scale that failed is tried again.
        min_scale: the scale never falls below.
        max_scale: the scale never rises above.

    >>> policy = Histogram(period=1)
    >>> state = policy.start()
    >>> for share in (0, 0.01, 0, 0.01, 0, 0):
    ...     state = policy.next(state, Seen(upper_share=np.float32(share)), np)
    ...     print(f"2**{np.log2(state.scale):.0f}")
    2**17
    2**16
    2**17
    2**16
    2**16
    2**17
    """

    format: FormatField = FORMAT_FP16
    init_scale: float = 2.0**16
    edge: float = 0.0625
    threshold: float = 1e-7
    period: int = 16
    longest_wait: int = 2048
    min_scale: float = USELESS_SCALE
    max_scale: float = HIGHEST_SCALE

    needs: ClassVar[frozenset[str]] = frozenset({"finite", "loss_finite", "upper_share"})
    is_compiled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_format(self)
        check_bounds(self)
        check_share(self, "edge", "threshold")
        if not self.edge >= 2.0**-24:
            raise ValueError(f"`edge` must be at least 2**-24 of the format's maximum. Received: edge={self.edge!r}.")
        check_counts(self, "period", "longest_wait")
        if not self.period <= self.longest_wait <= LONGEST_WAIT:
            raise ValueError(
                "`longest_wait` must lie between `period` and 2**30. "
                f"Received: period={self.period!r}, longest_wait={self.longest_wait!r}."
            )

    @property
    def edge_magnitude(self) -> float:
        """The edge: `seen.upper_share` is the share of scaled gradients whose magnitude is above it."""
        return self.edge * self.format.max

    def start(self) -> HistogramState:
        """Returns the state before the first step."""
        return HistogramState(scale=np.float32(self.init_scale), retry_interval=np.int32(self.period))

    def next(self, state: HistogramState, seen: Seen, xp: Namespace) -> HistogramState:
        """Returns the state after one step.

        A share above the threshold halves the scale at once; an overflow lowers it by `edge`. Enough clean steps in a
        row with a share below double it. A non-finite loss changes nothing but the counters. Does not synchronize with
        the device.
        """
        clean, overflow = verdict(seen, xp)
        share = state.scale * 0 + seen.upper_share  # an array of the framework, also where `seen` has numpy's default
        falls = xp.logical_or(overflow, xp.logical_and(clean, share > self.threshold))
        quiet = xp.logical_and(clean, share <= self.threshold)
        quiet_steps = xp.where(quiet, one_more(state.clean_steps, xp), xp.where(falls, 0, state.clean_steps))
        has_failed = state.failed_scale > 0
        # Only the step that reaches the failed scale is delayed. The growth below it keeps its pace.
        doubles_to_failed = xp.logical_and(has_failed, state.scale * 2.0 >= state.failed_scale)
        retried = xp.logical_and(has_failed, state.scale >= state.failed_scale)
        interval = state.retry_interval
        longer = smaller(interval * 2, self.longest_wait, xp)
        rises = xp.logical_and(quiet, quiet_steps >= xp.where(doubles_to_failed, interval, self.period))
        holds = xp.logical_and(rises, retried)
        return counted(
            state,
            clean,
            xp,
            scale=self._moved(state.scale, rises, falls, overflow, xp),
            clean_steps=xp.where(rises, 0, quiet_steps),
            stuck=xp.logical_and(overflow, state.scale <= self.min_scale),
            failed_scale=xp.where(falls, state.scale, xp.where(holds, 0.0, state.failed_scale)),
            retry_interval=xp.where(retried, xp.where(falls, longer, xp.where(rises, self.period, interval)), interval),
        )

    def _moved(self, scale: Array, rises: Array, falls: Array, overflow: Array, xp: Namespace) -> Array:
        """Returns the scale after the step, within the bounds."""
        # A power of two, so that the scale stays one.
        drop = xp.where(overflow, pow2_floor(scale * 0 + self.edge, xp), 0.5)
        moved = xp.where(rises, scale * 2.0, xp.where(falls, scale * drop, scale))
        return bounded(moved, self.min_scale, self.max_scale, xp)
