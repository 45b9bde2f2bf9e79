"""The table of scales for the policies that measure the gradients: unscaled gradients in, the scale out.

Written by hand. Each number of a row is a tensor of `ELEMENTS` elements of that value, whose norm is 3 bits above its
largest magnitude: a policy that is given the one in place of the other ends up at another scale. With FP16 and a
margin of 2 bits the peak may reach 16376, so that a peak of 2**-10 aims at 2**23.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from gradscale import FP8_E5M2, Dynamic, Policy, Static
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.policies.log_max import LogMax

ELEMENTS = 64

CLIPS = (None, 2.0**-12)
"""Bounds on the norm that must not change a scale: none, and one that clips most of the steps."""


class Row(NamedTuple):
    """A step with these unscaled gradients, and the scale after it."""

    grads: tuple[float, ...]
    scale: float
    loss: float = 1.0


@dataclass(frozen=True)
class ScaleCase:
    """A policy and the scales it goes through."""

    name: str
    policy: Policy
    rows: tuple[Row, ...]


EQUAL = (2.0**-10, 0.0)
SMALL = (2.0**-10, -(2.0**-20))
LARGE = (-16.0, 0.0)
ZERO = (0.0, 0.0)
INF = (math.inf, 0.0)
MINUS_INF = (2.0**-10, -math.inf)
NAN = (math.nan, 16.0)

BAD_LOSSES = ((NAN, math.nan), (INF, math.inf), (NAN, math.nan), (LARGE, math.nan), (SMALL, math.inf))
"""Unscaled gradients and losses that are not finite. No scale could have helped, whatever the gradients."""


def held(name: str, policy: Policy) -> ScaleCase:
    """Returns the case in which `policy` keeps its first scale through bad losses."""
    scale = float(policy.start().scale)
    rows = [Row(grads, scale, loss=loss) for grads, loss in BAD_LOSSES]
    return ScaleCase(f"a non-finite loss holds the scale: {name}", policy, tuple(rows))


LOSS_CASES = (
    held("headroom", Headroom()),
    held("logmax", LogMax()),
    held("histogram", Histogram(period=1)),
    held("dynamic", Dynamic(growth_interval=1)),
    held("dynamic with hysteresis", Dynamic(hysteresis=2)),
    held("static", Static(1024.0)),
)
"""Every policy of gradscale's own. Those of other systems back off, as these do."""

SCALE_CASES = (
    ScaleCase(
        "headroom finds the scale with the second gradient, and is 4 bits below it with the first",
        Headroom(),
        (Row(SMALL, 2.0**19), Row(SMALL, 2.0**23), Row(SMALL, 2.0**23)),
    ),
    ScaleCase(
        "headroom takes the first gradient for an outlier also where it starts at its aim",
        Headroom(init_scale=2.0**23),
        (Row(SMALL, 2.0**19), Row(SMALL, 2.0**23), Row(SMALL, 2.0**23)),
    ),
    ScaleCase(
        "headroom halves its peak in the three steps after the first",
        Headroom(leak=0.0),
        (Row((1.0, 0.0), 2.0**9), Row(SMALL, 2.0**14), Row(SMALL, 2.0**15), *[Row(SMALL, 2.0**16)] * 3),
    ),
    ScaleCase(
        # 2**-10 is 10 bits below the peak: it decays by half, 8 times the leak. From 8 bits on it decays by 1/16.
        "headroom forgets a peak, faster while it is far above the gradients",
        Headroom(leak=2.0**-4),
        (
            Row((1.0, 0.0), 2.0**9),
            *[Row((1.0, 0.0), 2.0**13)] * 3,
            Row(SMALL, 2.0**14),
            Row(SMALL, 2.0**15),
            *[Row(SMALL, 2.0**16)] * 8,
        ),
    ),
    ScaleCase(
        "headroom comes down at once when the gradients grow",
        Headroom(init_scale=2.0**11),
        (Row(SMALL, 2.0**19), Row(SMALL, 2.0**23), Row(LARGE, 2.0**9), Row(LARGE, 2.0**9)),
    ),
    ScaleCase(
        "headroom stays 4 bits below the scale of an early overflow",
        Headroom(init_scale=2.0**23),
        (Row(SMALL, 2.0**19), Row(SMALL, 2.0**23), Row(INF, 2.0**19), Row(SMALL, 2.0**19), Row(SMALL, 2.0**19)),
    ),
    ScaleCase(
        "headroom stays 12 bits below the scale of an overflow that follows 16 clean steps",
        Headroom(),
        (
            Row(SMALL, 2.0**19),
            *[Row(SMALL, 2.0**23)] * 15,
            Row(INF, 2.0**11),
            Row(SMALL, 2.0**11),
            Row(INF, 2.0**7),
            Row(SMALL, 2.0**7),
        ),
    ),
    ScaleCase(
        # Below 2**3.9993, half of the range below the top, a clean step doubles the ceiling.
        "headroom falls by 4 bits at each overflow, and doubles while it is very low",
        Headroom(init_scale=2.0**23),
        (
            Row(SMALL, 2.0**19),
            Row(SMALL, 2.0**23),
            Row(INF, 2.0**19),
            Row(INF, 2.0**15),
            Row(INF, 2.0**11),
            Row(INF, 2.0**7),
            Row(INF, 2.0**3),
            Row(INF, 2.0**-1),
            Row(INF, 2.0**-5),
            Row(SMALL, 2.0**-4),
            Row(SMALL, 2.0**-3),
            Row(INF, 2.0**-7),
            Row(SMALL, 2.0**-6),
        ),
    ),
    ScaleCase(
        # In units of 2**19 the ceiling is (17/16)**n until a sixteenth of it is more than 0.125, 1/256 of the top: at
        # step 12 it is 2.07, and 16 steps later 4.07. By sixteenths it would be above 4 five steps earlier.
        "headroom's ceiling rises by a sixteenth of itself at most, and by its share of the top",
        Headroom(recovery=2.0**-8),
        (
            Row(SMALL, 2.0**19),
            Row(SMALL, 2.0**23),
            Row(INF, 2.0**19),
            *[Row(SMALL, 2.0**19)] * 11,
            *[Row(SMALL, 2.0**20)] * 16,
            Row(SMALL, 2.0**21),
        ),
    ),
    ScaleCase(
        "headroom goes down by 4 bits while it has seen no gradient, as far as the floor",
        Headroom(init_scale=2.0**-12),
        (Row(INF, 2.0**-16), Row(INF, 2.0**-20), Row(INF, 2.0**-24), Row(INF, 2.0**-24)),
    ),
    ScaleCase(
        # Each zero doubles the ceiling, from 2**16 on: after the second one it is 2**18.
        "headroom goes up while every gradient is zero, and no higher than overflows allow",
        Headroom(),
        (
            Row(ZERO, 2.0**16),
            Row(ZERO, 2.0**20),
            Row(INF, 2.0**16),
            Row(ZERO, 2.0**16),
            Row(ZERO, 2.0**18),
            Row(SMALL, 2.0**18),
        ),
    ),
    ScaleCase(
        # The second clean step halves the peak, if it shows no larger gradient.
        "headroom forgets its peak at zeros, and ignores losses that are not finite",
        Headroom(init_scale=2.0**23),
        (Row(SMALL, 2.0**19), Row(ZERO, 2.0**24), Row(LARGE, 2.0**24, loss=math.nan), Row(SMALL, 2.0**23)),
    ),
    ScaleCase(
        "logmax aims at the last gradient where it allows for no deviation",
        LogMax(deviations=0.0),
        (
            Row(SMALL, 2.0**21),
            Row(SMALL, 2.0**25),
            Row(LARGE, 2.0**11),
        ),
    ),
    ScaleCase(
        # The variance starts at 1 and is 1/2, 1/3 and 1/4 after equal steps: 2.2, 1.8 and 1.5 bits. The first step is
        # 4 bits lower.
        "logmax leaves room for deviations, and less the longer there are none",
        LogMax(),
        (
            Row(SMALL, 2.0**19),
            Row(SMALL, 2.0**24),
            Row(SMALL, 2.0**24),
        ),
    ),
    ScaleCase(
        # The peak is 2.2 bits above 2**-10 and may reach 65504: the top is 2**23.7. Below 2**3.7, and at zeros before
        # any gradient, clean steps double the ceiling.
        "logmax answers overflows, zeros and bad losses as headroom does",
        LogMax(),
        (
            Row(INF, 2.0**0),
            Row(ZERO, 2.0**1),
            Row(ZERO, 2.0**2),
            Row(SMALL, 2.0**3),
            Row(LARGE, 2.0**3, loss=math.nan),
            Row(SMALL, 2.0**4),
            Row(INF, 2.0**0),
            Row(INF, 2.0**-4),
            Row(INF, 2.0**-8),
            Row(SMALL, 2.0**-7),
            Row(SMALL, 2.0**-6),
        ),
    ),
    ScaleCase(
        "histogram rises while few gradients are above the edge, and takes longer to try a scale that failed twice",
        Histogram(init_scale=1024.0, period=2),
        (
            Row((1.0, 0.5), 1024.0),
            Row((1.0, 0.5), 2048.0),
            Row((1.0, 0.5), 2048.0),
            Row((1.0, 0.5), 4096.0),
            Row((1.0, 0.5), 2048.0),
            Row((1.0, 0.5), 2048.0),
            Row((1.0, 0.5), 4096.0),
            Row((1.0, 0.5), 2048.0),
            Row((1.0, 0.5), 2048.0),
            Row((1.0, 0.5), 2048.0),
            Row((1.0, 0.5), 2048.0),
            Row((1.0, 0.5), 4096.0),
            Row((1.0, 0.5), 2048.0),
        ),
    ),
    ScaleCase(
        "histogram comes down by the width of its edge when a step overflows",
        Histogram(init_scale=1024.0),
        (Row(INF, 64.0), Row((1.0, math.nan), 4.0), Row((1.0, 1.0), 4.0, loss=math.inf)),
    ),
    ScaleCase(
        "histogram tolerates a share below its threshold",
        Histogram(init_scale=4096.0, period=1, threshold=0.5),
        (Row((1.0, 0.5), 8192.0), Row((1.0, 0.5), 4096.0)),
    ),
    ScaleCase(
        # The finite gradients beside those that overflow are no peak to learn from: 16 would lower the aim to 2**9.
        "headroom learns no peak from a step that overflows",
        Headroom(init_scale=2.0**23),
        (
            Row(SMALL, 2.0**19),
            Row(SMALL, 2.0**23),
            Row(NAN, 2.0**19),
            Row(SMALL, 2.0**19),
            Row(MINUS_INF, 2.0**15),
            Row(SMALL, 2.0**15),
        ),
    ),
    ScaleCase(
        # By 4 bits as in FP16. It doubles below 2**7.8, 16 bits below the top, 57344 / 4 * 2**10.
        "headroom doubles from a higher scale on in a narrow format",
        Headroom(FP8_E5M2, init_scale=2.0**23),
        (
            Row(SMALL, 2.0**19),
            Row(SMALL, 2.0**23),
            Row(NAN, 2.0**19),
            Row(SMALL, 2.0**19),
            Row(MINUS_INF, 2.0**15),
            Row(INF, 2.0**11),
            Row(INF, 2.0**7),
            Row(INF, 2.0**3),
            Row(SMALL, 2.0**4),
            Row(SMALL, 2.0**5),
        ),
    ),
    ScaleCase(
        # 4 bits down, to the floor; and up again by doubling.
        "headroom takes gradients that are finite only while scaled for an overflow",
        Headroom(init_scale=2.0**-20),
        (Row((2.0**130, 0.0), 2.0**-24), Row(SMALL, 2.0**-23), Row(SMALL, 2.0**-22)),
    ),
    ScaleCase(
        "logmax learns no peak from a step that overflows",
        LogMax(deviations=0.0),
        (
            Row(SMALL, 2.0**21),
            Row(SMALL, 2.0**25),
            Row(NAN, 2.0**21),
            Row(MINUS_INF, 2.0**17),
            Row(SMALL, 2.0**17),
        ),
    ),
    ScaleCase(
        # 20 steps, as an adapter that clips may measure the largest magnitude less often after the first 16.
        "headroom follows gradients for longer than every step is measured",
        Headroom(init_scale=2.0**23),
        (Row(EQUAL, 2.0**19), *[Row(EQUAL, 2.0**23)] * 17, Row(LARGE, 2.0**9), Row(LARGE, 2.0**9)),
    ),
)
