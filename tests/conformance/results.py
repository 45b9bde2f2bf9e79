"""The table of results: unscaled gradients in, what the result and the metrics report out. Written by hand.

All cases but the last have the same parameters, so that frameworks which compile a step compile few of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gradscale import CheckOnly, Dynamic, Headroom, Histogram, LogMax, NoScaling, Policy, Static, Status
from gradscale.engine.culprits import Culprit

Values = Mapping[str, list[float]]


class Report(NamedTuple):
    """A step, and what it reports.

    Attributes:
        grads: unscaled gradients by parameter, followed by zeros; a parameter without any has no gradient.
        status: the status of the step.
        amax: largest magnitude; must be reported where the policy needs it.
        norm: norm; must be reported where `clip_norm` is given.
        culprits: the parameters whose gradients were not finite; None where an adapter need not find them.
        loss: the unscaled loss.
    """

    grads: Values
    status: Status
    amax: float | None
    norm: float | None
    culprits: tuple[Culprit, ...] | None = ()
    loss: float = 1.0


@dataclass(frozen=True)
class ResultCase:
    """A policy, a bound on the norm, the steps, how many elements each parameter has, and the type of the gradients."""

    name: str
    policy: Policy
    clip_norm: float | None
    steps: tuple[Report, ...]
    elements: Mapping[str, int]
    dtype: str = "float32"


APPLIED, OVERFLOW = Status.APPLIED, Status.OVERFLOW
NONFINITE_LOSS, NO_GRADS = Status.NONFINITE_LOSS, Status.NO_GRADS

inf, nan = math.inf, math.nan

ELEMENTS = {"first": 64, "second": 256, "third": 1}
# A kernel may treat a long tensor otherwise: torch's norm from 32,768 elements on, XLA's maximum from 4,096.
LONG = {"first": 1, "second": 40_000}

CLEAN = {"first": [1.5], "second": [0.0], "third": [-2.0]}
SMALL = {"first": [2.0**-10], "second": [0.0], "third": [0.0]}

FINITE = (Report(CLEAN, APPLIED, 2.0, 2.5), Report(SMALL, APPLIED, 2.0**-10, 2.0**-10))

STEPS = (
    Report(CLEAN, APPLIED, 2.0, 2.5),
    Report(CLEAN | {"first": [inf]}, OVERFLOW, inf, inf, (Culprit("first", "inf", 1),)),
    Report(SMALL, APPLIED, 2.0**-10, 2.0**-10),
    Report(CLEAN | {"second": [0.0, -inf]}, OVERFLOW, inf, inf, (Culprit("second", "inf", 1),)),
    Report(CLEAN | {"second": [inf, -inf]}, OVERFLOW, inf, inf, (Culprit("second", "inf", 2),)),
    Report(SMALL | {"third": [nan]}, OVERFLOW, inf, inf, (Culprit("third", "nan", 1),)),
    Report(CLEAN | {"first": [nan, 1.0, inf]}, OVERFLOW, inf, inf, (Culprit("first", "nan", 2),)),
    Report(
        {"first": [inf, 1.0, inf], "second": [2.0], "third": [nan]},
        OVERFLOW,
        inf,
        inf,
        (Culprit("first", "inf", 2), Culprit("third", "nan", 1)),
    ),
    # Norms of tensors are 24 and 32, and that of both is 40: the largest magnitude is none of them.
    Report({"first": [-3.0] * 64, "second": [2.0] * 256, "third": [0.0]}, APPLIED, 3.0, 40.0),
    Report({"first": [0.0], "second": [-0.0], "third": [0.0]}, APPLIED, 0.0, 0.0),
)

# A number that float32 holds only times a scale below 2**-4, to which overflows in a row bring a scale down.
DIVIDED = Report(CLEAN | {"first": [2.0**132]}, OVERFLOW, inf, inf, None)
DESCENT = (*[Report(CLEAN | {"first": [inf]}, OVERFLOW, inf, inf, (Culprit("first", "inf", 1),))] * 6, DIVIDED)

ONES = [1.0] * 39_999

LONG_STEPS = (
    Report({"first": [0.0], "second": [0.5] * 16_384 + [0.0] * 23_615 + [-48.0]}, APPLIED, 48.0, 80.0),
    Report({"first": [1.0], "second": [*ONES, inf]}, OVERFLOW, inf, inf, (Culprit("second", "inf", 1),)),
    Report({"first": [1.0], "second": [*ONES, -inf]}, OVERFLOW, inf, inf, (Culprit("second", "inf", 1),)),
    Report({"first": [1.0], "second": [nan, *ONES]}, OVERFLOW, inf, inf, (Culprit("second", "nan", 1),)),
    Report({"first": [1.0], "second": [*ONES, nan]}, OVERFLOW, inf, inf, (Culprit("second", "nan", 1),)),
)

LOSSES = (
    Report(CLEAN, APPLIED, 2.0, 2.5),
    Report(CLEAN, NONFINITE_LOSS, 2.0, 2.5, loss=nan),
    Report(SMALL, NONFINITE_LOSS, 2.0**-10, 2.0**-10, loss=-inf),
    Report(CLEAN | {"first": [inf]}, NONFINITE_LOSS, inf, inf, (Culprit("first", "inf", 1),), loss=inf),
    Report(CLEAN | {"third": [nan]}, NONFINITE_LOSS, inf, inf, (Culprit("third", "nan", 1),), loss=nan),
)

SCALE = 1024.0

POLICIES = (
    Headroom(init_scale=SCALE),
    LogMax(init_scale=SCALE),
    Histogram(init_scale=SCALE),
    Dynamic(init_scale=SCALE),
    Static(SCALE),
)

CLIPS = {"clipped": 1.0, "not clipped": None}


def cases(title: str, policy: Policy, steps: tuple[Report, ...], elements: Mapping[str, int]) -> list[ResultCase]:
    """Returns the case with and without clipping."""
    kind = type(policy).__name__
    return [ResultCase(f"{title}: {kind}, {name}", policy, clip, steps, elements) for name, clip in CLIPS.items()]


RESULT_CASES = (
    *(case for policy in POLICIES for case in cases("finite and not", policy, STEPS, ELEMENTS)),
    *(case for policy in POLICIES[::4] for case in cases("losses that are not finite", policy, LOSSES, ELEMENTS)),
    *(case for policy in POLICIES[:2] for case in cases("finite only while scaled", policy, DESCENT, ELEMENTS)),
    *cases("finite only while scaled", Static(2.0**-20), (DIVIDED,), ELEMENTS),
    *cases(
        "no gradients",
        Headroom(init_scale=SCALE),
        (Report(CLEAN, APPLIED, 2.0, 2.5), Report({}, NO_GRADS, None, None)),
        ELEMENTS,
    ),
    *cases(
        "no gradient for some",
        Headroom(init_scale=SCALE),
        (
            Report({"first": [1.5], "third": [2.0]}, APPLIED, 2.0, 2.5),
            Report({"first": [1.5], "third": [nan]}, OVERFLOW, inf, inf, (Culprit("third", "nan", 1),)),
        ),
        ELEMENTS,
    ),
    *cases("a check alone", CheckOnly(), STEPS, ELEMENTS),
    *cases("a check alone: losses that are not finite", CheckOnly(), LOSSES, ELEMENTS),
    *cases("no scaling", NoScaling(), FINITE, ELEMENTS),
    *(
        ResultCase(f"{dtype} gradients", Headroom(init_scale=SCALE), 1.0, STEPS[:4], ELEMENTS, dtype)
        for dtype in ("float16", "bfloat16", "float64", "complex64")
    ),
    *cases("a long tensor", Headroom(init_scale=SCALE), LONG_STEPS, LONG),
)

EXTREMES: Mapping[str, list[float]] = {
    "squares overflow": [2.0**70, 1.0, 0.0, 0.0],
    "sums overflow": [3e38, 3e38, -3e38, 3e38],
    "squares vanish": [2.0**-80, 0.0, 0.0, 0.0],
}
"""Scaled gradients that are finite, and of which float32 cannot hold what a kernel may make of them on the way."""
