"""Compares the sides of one case: the time of a step, and its reads and writes of gradient memory."""

import statistics
from dataclasses import dataclass

from gradscale.bench.steps import BARE, TORCH, Case, all_sides
from gradscale.bench.traffic import Traffic, count
from gradscale.bench.turns import ratio, ratio_quartiles, take_turns
from gradscale.policies.contract import Policy


@dataclass(frozen=True, slots=True)
class Measured:
    """The cost of one side's step.

    Attributes:
        side: name of the side.
        median_ms: the median of its times.
        times_torch: that median over the median of torch's scaler.
        quartiles: of the ratios to torch's scaler in the same round.
        passes_read: how often the gradients are read.
        passes_written: how often the gradients are written.
        host_reads: synchronizations with the device, beyond those of the optimizer and the clip by themselves.
        peak_allocated: the most bytes that new tensors take at one time.
    """

    side: str
    median_ms: float
    times_torch: float
    quartiles: tuple[float, float]
    passes_read: float
    passes_written: float
    host_reads: int
    peak_allocated: int


def compare(case: Case, policy: Policy, repeats: int) -> list[Measured]:
    """Returns the cost of every side, each timed `repeats` times, at least twice. `policy` is that of `LossScaler`."""
    sides = all_sides(case, policy)
    seconds = take_turns(sides, repeats)
    # Counted after the timing: a dispatch mode makes every operator slower.
    traffic = {name: count(side) for name, side in sides.items()}
    own_reads = len(traffic[BARE].host_reads)
    return [_measured(name, seconds[name], seconds[TORCH], traffic[name], own_reads) for name in sides]


def _measured(name: str, seconds: list[float], torchs: list[float], traffic: Traffic, own_reads: int) -> Measured:
    return Measured(
        side=name,
        median_ms=statistics.median(seconds) * 1e3,
        times_torch=ratio(seconds, torchs),
        quartiles=ratio_quartiles(seconds, torchs),
        passes_read=traffic.passes_read,
        passes_written=traffic.passes_written,
        host_reads=len(traffic.host_reads) - own_reads,
        peak_allocated=traffic.peak_allocated,
    )
