"""Synthetic training runs: streams of the largest gradient, and what a policy makes of them in FP16.

A step overflows when `amax * hidden * scale` rounds past the format's maximum. `hidden` is how much larger the largest
gradient of an activation is than that of a parameter: it overflows like any other, but no policy sees it. A gradient
that the scale leaves below half of the smallest subnormal is seen as zero.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradscale import FP16, Format, Policy, Seen
from gradscale.policies.checks import LOWEST_SCALE
from gradscale.record import fields, with_values

Matrix = np.ndarray[Any, Any]

DEVIATIONS = 4.9
ELEMENTS = 1e6
"""Gradient elements are taken for normal. The largest of a million of them stands 4.9 standard deviations out."""


@dataclass(frozen=True)
class Stream:
    """Runs side by side: one row a step, one column a run.

    Attributes:
        amax: the largest unscaled parameter gradient.
        hidden: how many times larger the largest gradient of all is.
    """

    amax: Matrix
    hidden: Matrix


@dataclass(frozen=True)
class Run:
    """What a policy did with a stream.

    Attributes:
        scales: the scale that each step ran with.
        overflowed: the steps that were skipped.
        bits_low: bits from each scale up to the one that brings the largest gradient to the format's maximum.
        state: the state after the last step.
    """

    scales: Matrix
    overflowed: Matrix
    bits_low: Matrix
    state: Any


def simulate(policy: Policy, stream: Stream, format: Format = FP16) -> Run:
    """Returns what `policy` does with the stream, all columns at once.

    Args:
        policy: the policy.
        stream: the gradients.
        format: what they must fit.
    """
    start = policy.start()
    columns = stream.amax.shape[1]
    state = with_values(start, {field.name: np.full(columns, getattr(start, field.name)) for field in fields(start)})
    scales, overflowed = np.empty(stream.amax.shape), np.empty(stream.amax.shape, bool)
    for step, (amax, hidden) in enumerate(zip(stream.amax, stream.hidden, strict=True)):
        scales[step] = state.scale
        scaled = amax * scales[step]
        overflowed[step] = scaled * hidden >= format.overflow_threshold
        scaled[scaled <= format.smallest_subnormal / 2] = 0
        state = policy.next(state, _seen(policy, scaled, state.scale, overflowed[step], format), np)
    return Run(scales, overflowed, np.log2(format.max / (stream.amax * stream.hidden)) - np.log2(scales), state)


def best_scales(stream: Stream, steps: int, format: Format = FP16) -> Matrix:
    """Returns the largest power of two with which none of the first steps overflows, for each run.

    Steps that overflow at any scale do not count.
    """
    largest = (stream.amax * stream.hidden)[:steps]
    largest = np.where(largest < format.max / LOWEST_SCALE, largest, 0.0).max(0)
    return 2.0 ** np.floor(np.log2(format.max / largest))


def _seen(policy: Policy, scaled: Matrix, scale: Matrix, overflowed: Matrix, format: Format) -> Seen:
    """Returns what the step shows: nothing of its size where it overflowed."""
    amax = np.where(overflowed, np.inf, scaled / scale).astype(np.float32)
    if "upper_share" not in policy.needs:
        return Seen(finite=~overflowed, loss_finite=np.ones_like(overflowed), amax=amax)
    edge = np.float64(getattr(policy, "edge_magnitude", format.max))
    distance = edge / np.maximum(scaled, format.smallest_subnormal) * DEVIATIONS / math.sqrt(2)
    share = np.floor(np.vectorize(math.erfc)(distance) * ELEMENTS) / ELEMENTS
    return Seen(finite=~overflowed, loss_finite=np.ones_like(overflowed), upper_share=share.astype(np.float32))


def plain(rng: np.random.Generator, steps: int, columns: int) -> Stream:
    """Returns gradients around 2**-6 whose logarithm varies by half a bit, and no hidden ones."""
    amax = 2.0 ** rng.normal(-6, 0.5, (steps, columns))
    return Stream(amax, np.ones_like(amax))


Change = Callable[[np.random.Generator, Stream], Stream]


def _times(stream: Stream, factor: Matrix | float) -> Stream:
    return Stream(stream.amax * factor, stream.hidden)


def _hiding(stream: Stream, factor: Matrix | float) -> Stream:
    return Stream(stream.amax, stream.hidden * factor)


def _from_sixth(stream: Stream, factor: float) -> Stream:
    """Returns the stream with everything after its first sixth multiplied by `factor`."""
    after = np.arange(len(stream.amax))[:, None] >= len(stream.amax) // 6
    return _times(stream, np.where(after, factor, 1.0))


def _gan(rng: np.random.Generator, stream: Stream) -> Stream:
    """Returns two networks that take turns, 6 bits apart, under one scale, with up to 3 bits hidden at random."""
    turns = np.arange(len(stream.amax))[:, None] % 2
    return _hiding(_times(stream, 2.0 ** (6 * turns)), 2.0 ** rng.uniform(0, 3, stream.amax.shape))


def _storm(_: np.random.Generator, stream: Stream) -> Stream:
    """Returns the stream with ten steps in a row, after its first sixth, that overflow whatever the scale."""
    step = np.arange(len(stream.amax))[:, None] - len(stream.amax) // 6
    return _hiding(stream, np.where((step >= 0) & (step < 10), 2.0**300, 1.0))


def _policy_gradient(rng: np.random.Generator, stream: Stream) -> Stream:
    """Returns gradients that start 4 bits larger, fall by 6 bits and vary by 1.5."""
    progress = np.arange(len(stream.amax))[:, None] / len(stream.amax)
    return _times(stream, 2.0 ** (4 - 6 * progress + rng.normal(0, 1.5, stream.amax.shape)))


def _early_training(_: np.random.Generator, stream: Stream) -> Stream:
    """Returns gradients that start 6 bits larger and fall by 10 within the first thousand steps, with 2 bits hidden."""
    fallen = 10 * (1 - np.exp(-np.arange(len(stream.amax))[:, None] / 400))
    return _hiding(_times(stream, 2.0 ** (6 - fallen)), 2.0**2)


CHANGES: dict[str, Change] = {
    "steady": lambda rng, stream: stream,
    "tiny: x 1e-7": lambda rng, stream: _times(stream, 1e-7),
    "huge: x 2**24": lambda rng, stream: _times(stream, 2.0**24),
    "up 20 bits at once": lambda rng, stream: _from_sixth(stream, 2.0**20),
    "down 20 bits at once": lambda rng, stream: _from_sixth(stream, 2.0**-20),
    "random walk, 0.1 bit": lambda rng, stream: _times(
        stream, 2.0 ** np.cumsum(rng.normal(0, 0.1, stream.amax.shape), 0)
    ),
    "3 bits hidden": lambda rng, stream: _hiding(stream, 2.0**3),
    "8 bits hidden": lambda rng, stream: _hiding(stream, 2.0**8),
    "hidden at random": lambda rng, stream: _hiding(stream, 2.0 ** np.abs(rng.normal(0, 2.5, stream.amax.shape))),
    "GAN": _gan,
    "spikes: 1% x 100": lambda rng, stream: _times(stream, np.where(rng.random(stream.amax.shape) < 0.01, 100.0, 1.0)),
    "storm of 10 overflows": _storm,
    "rare spikes: 0.2% x 1000": lambda rng, stream: _times(
        stream, np.where(rng.random(stream.amax.shape) < 0.002, 1000.0, 1.0)
    ),
    "policy gradient": _policy_gradient,
    "early training: down 10 bits, 2 hidden": _early_training,
    "bad batches: 0.5% at any scale": lambda rng, stream: _hiding(
        stream, np.where(rng.random(stream.amax.shape) < 0.005, 2.0**300, 1.0)
    ),
}
"""The streams by name: each a change of the plain one."""

PREVENTABLE = tuple(name for name in CHANGES if name not in ("storm of 10 overflows", "bad batches: 0.5% at any scale"))
"""The streams without those whose overflows no scale prevents, and which every policy skips alike."""


def named(name: str, steps: int, columns: int, seed: int = 0) -> Stream:
    """Returns the stream called `name`."""
    rng = np.random.default_rng(seed)
    return CHANGES[name](rng, plain(rng, steps, columns))


def side_by_side(streams: list[Stream]) -> Stream:
    """Returns the streams as one, so that they are simulated together."""
    return Stream(np.hstack([s.amax for s in streams]), np.hstack([s.hidden for s in streams]))
