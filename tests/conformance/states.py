"""The table of states: what happens in, the whole state out after every step. Written by hand from the rules."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from gradscale import CheckOnly, Dynamic, NoScaling, Policy, Static, preset


class Event(Enum):
    """What a step looks like."""

    CLEAN = "finite gradients and a finite loss"
    INF = "a gradient that is inf"
    NAN = "a gradient that is NaN"
    BAD_LOSS = "a loss that is NaN, with finite gradients"
    BAD_BOTH = "a loss that is inf, with gradients that are NaN"
    NO_GRADS = "no gradient at all"


CLEAN, INF, NAN, BAD_LOSS, BAD_BOTH, NO_GRADS = Event


class Row(NamedTuple):
    """A step, and the state after it."""

    event: Event
    scale: float
    clean_steps: int
    credits: int
    applied: int
    skipped: int
    consecutive_skips: int
    stuck: bool


@dataclass(frozen=True)
class StateCase:
    """A policy and the states it goes through."""

    name: str
    policy: Policy
    rows: tuple[Row, ...]


no, yes = False, True

STATE_CASES = (
    StateCase(
        "the scale grows after every interval of clean steps",
        Dynamic(init_scale=1024.0, growth_interval=2),
        #         event  scale  clean credits applied skipped in a row stuck
        (
            Row(CLEAN, 1024.0, 1, 1, 1, 0, 0, no),
            Row(CLEAN, 2048.0, 0, 1, 2, 0, 0, no),
            Row(CLEAN, 2048.0, 1, 1, 3, 0, 0, no),
            Row(CLEAN, 4096.0, 0, 1, 4, 0, 0, no),
        ),
    ),
    StateCase(
        "an interval of one grows at every clean step",
        Dynamic(init_scale=1.0, growth_interval=1),
        (
            Row(CLEAN, 2.0, 0, 1, 1, 0, 0, no),
            Row(CLEAN, 4.0, 0, 1, 2, 0, 0, no),
        ),
    ),
    StateCase(
        "an overflow halves the scale and starts the interval again",
        Dynamic(init_scale=1024.0, growth_interval=3),
        (
            Row(CLEAN, 1024.0, 1, 1, 1, 0, 0, no),
            Row(CLEAN, 1024.0, 2, 1, 2, 0, 0, no),
            Row(INF, 512.0, 0, 0, 2, 1, 1, no),
            Row(CLEAN, 512.0, 1, 0, 3, 1, 0, no),
            Row(CLEAN, 512.0, 2, 0, 4, 1, 0, no),
            Row(CLEAN, 1024.0, 0, 1, 5, 1, 0, no),
        ),
    ),
    StateCase(
        "a NaN is an overflow",
        Dynamic(init_scale=1024.0),
        (
            Row(NAN, 512.0, 0, 0, 0, 1, 1, no),
            Row(INF, 256.0, 0, 0, 0, 2, 2, no),
            Row(CLEAN, 256.0, 1, 0, 1, 2, 0, no),
        ),
    ),
    StateCase(
        "factors need not be powers of two",
        Dynamic(init_scale=96.0, growth_factor=1.5, backoff_factor=0.25, growth_interval=1),
        (
            Row(CLEAN, 144.0, 0, 1, 1, 0, 0, no),
            Row(INF, 36.0, 0, 0, 1, 1, 1, no),
            Row(CLEAN, 54.0, 0, 1, 2, 1, 0, no),
        ),
    ),
    StateCase(
        "hysteresis forgives the first overflow, and a growth forgives again",
        Dynamic(init_scale=1024.0, growth_interval=2, hysteresis=2, refill="growth"),
        (
            Row(INF, 1024.0, 0, 1, 0, 1, 1, no),
            Row(CLEAN, 1024.0, 1, 1, 1, 1, 0, no),
            Row(INF, 512.0, 0, 0, 1, 2, 1, no),
            Row(INF, 256.0, 0, 0, 1, 3, 2, no),
            Row(CLEAN, 256.0, 1, 0, 2, 3, 0, no),
            Row(CLEAN, 512.0, 0, 2, 3, 3, 0, no),
            Row(INF, 512.0, 0, 1, 3, 4, 1, no),
            Row(INF, 256.0, 0, 0, 3, 5, 2, no),
        ),
    ),
    StateCase(
        "hysteresis that any clean step refills",
        Dynamic(init_scale=1024.0, growth_interval=100, hysteresis=2, refill="clean"),
        (
            Row(INF, 1024.0, 0, 1, 0, 1, 1, no),
            Row(CLEAN, 1024.0, 1, 2, 1, 1, 0, no),
            Row(INF, 1024.0, 0, 1, 1, 2, 1, no),
            Row(INF, 512.0, 0, 0, 1, 3, 2, no),
            Row(INF, 256.0, 0, 0, 1, 4, 3, no),
            Row(CLEAN, 256.0, 1, 2, 2, 4, 0, no),
            Row(INF, 256.0, 0, 1, 2, 5, 1, no),
        ),
    ),
    StateCase(
        "hysteresis of three forgives two",
        Dynamic(init_scale=8.0, hysteresis=3),
        (
            Row(INF, 8.0, 0, 2, 0, 1, 1, no),
            Row(INF, 8.0, 0, 1, 0, 2, 2, no),
            Row(INF, 4.0, 0, 0, 0, 3, 3, no),
        ),
    ),
    StateCase(
        "the floor holds, and an overflow there is stuck",
        Dynamic(init_scale=4.0, min_scale=2.0, growth_interval=2),
        (
            Row(INF, 2.0, 0, 0, 0, 1, 1, no),
            Row(INF, 2.0, 0, 0, 0, 2, 2, yes),
            Row(INF, 2.0, 0, 0, 0, 3, 3, yes),
            Row(CLEAN, 2.0, 1, 0, 1, 3, 0, no),
            Row(CLEAN, 4.0, 0, 1, 2, 3, 0, no),
        ),
    ),
    StateCase(
        "a backoff that would pass the floor ends on it",
        Dynamic(init_scale=3.0, min_scale=2.0),
        (Row(INF, 2.0, 0, 0, 0, 1, 1, no),),
    ),
    StateCase(
        "a forgiven overflow at the floor is not stuck",
        Dynamic(init_scale=1.0, hysteresis=2),
        (
            Row(INF, 1.0, 0, 1, 0, 1, 1, no),
            Row(INF, 1.0, 0, 0, 0, 2, 2, yes),
        ),
    ),
    StateCase(
        "the ceiling holds",
        Dynamic(init_scale=4.0, max_scale=8.0, growth_interval=1),
        (
            Row(CLEAN, 8.0, 0, 1, 1, 0, 0, no),
            Row(CLEAN, 8.0, 0, 1, 2, 0, 0, no),
            Row(INF, 4.0, 0, 0, 2, 1, 1, no),
        ),
    ),
    StateCase(
        "a growth that would pass the ceiling ends on it",
        Dynamic(init_scale=6.0, max_scale=8.0, growth_interval=1),
        (Row(CLEAN, 8.0, 0, 1, 1, 0, 0, no),),
    ),
    StateCase(
        "the highest scale there is does not become inf",
        Dynamic(init_scale=2.0**125, growth_interval=1),
        (
            Row(CLEAN, 2.0**126, 0, 1, 1, 0, 0, no),
            Row(CLEAN, 2.0**126, 0, 1, 2, 0, 0, no),
        ),
    ),
    StateCase(
        "another system's scale stops at the lowest that gradients can be divided by, stuck, and rises again",
        preset("torch", init_scale=2.0**-125, growth_interval=1),
        (
            Row(INF, 2.0**-126, 0, 1, 0, 1, 1, yes),
            Row(INF, 2.0**-126, 0, 1, 0, 2, 2, yes),
            Row(CLEAN, 2.0**-125, 0, 1, 1, 2, 0, no),
        ),
    ),
    StateCase(
        "another system's scale stops at the highest that gradients can be divided by",
        preset("torch", init_scale=2.0**125, growth_interval=1),
        (
            Row(CLEAN, 2.0**126, 0, 1, 1, 0, 0, no),
            Row(CLEAN, 2.0**126, 0, 1, 2, 0, 0, no),
            Row(INF, 2.0**125, 0, 1, 2, 1, 1, no),
        ),
    ),
    StateCase(
        "a loss that is not finite moves nothing but the counters",
        Dynamic(init_scale=1024.0, growth_interval=2, hysteresis=2),
        (
            Row(INF, 1024.0, 0, 1, 0, 1, 1, no),
            Row(CLEAN, 1024.0, 1, 1, 1, 1, 0, no),
            Row(BAD_LOSS, 1024.0, 1, 1, 1, 2, 1, no),
            Row(BAD_BOTH, 1024.0, 1, 1, 1, 3, 2, no),
            Row(CLEAN, 2048.0, 0, 2, 2, 3, 0, no),
        ),
    ),
    StateCase(
        "a loss that is not finite is not stuck, even at the floor",
        Dynamic(init_scale=1.0),
        (
            Row(INF, 1.0, 0, 0, 0, 1, 1, yes),
            Row(BAD_BOTH, 1.0, 0, 0, 0, 2, 2, no),
        ),
    ),
    StateCase(
        "a step without gradients changes nothing at all",
        Dynamic(init_scale=1024.0, growth_interval=2),
        (
            Row(NO_GRADS, 1024.0, 0, 1, 0, 0, 0, no),
            Row(CLEAN, 1024.0, 1, 1, 1, 0, 0, no),
            Row(NO_GRADS, 1024.0, 1, 1, 1, 0, 0, no),
            Row(INF, 512.0, 0, 0, 1, 1, 1, no),
            Row(NO_GRADS, 512.0, 0, 0, 1, 1, 1, no),
        ),
    ),
    StateCase(
        "a static scale never moves, and every overflow is stuck",
        Static(100.0),
        (
            Row(CLEAN, 100.0, 0, 1, 1, 0, 0, no),
            Row(INF, 100.0, 0, 1, 1, 1, 1, yes),
            Row(NAN, 100.0, 0, 1, 1, 2, 2, yes),
            Row(BAD_LOSS, 100.0, 0, 1, 1, 3, 3, no),
            Row(CLEAN, 100.0, 0, 1, 2, 3, 0, no),
        ),
    ),
    StateCase(
        "a check alone skips and counts at scale 1, and every overflow is stuck",
        CheckOnly(),
        (
            Row(CLEAN, 1.0, 0, 1, 1, 0, 0, no),
            Row(INF, 1.0, 0, 1, 1, 1, 1, yes),
            Row(NAN, 1.0, 0, 1, 1, 2, 2, yes),
            Row(BAD_LOSS, 1.0, 0, 1, 1, 3, 3, no),
            Row(CLEAN, 1.0, 0, 1, 2, 3, 0, no),
        ),
    ),
    StateCase(
        "no scaling applies every step, whatever it looks like",
        NoScaling(),
        (
            Row(CLEAN, 1.0, 0, 1, 1, 0, 0, no),
            Row(INF, 1.0, 0, 1, 2, 0, 0, no),
            Row(BAD_LOSS, 1.0, 0, 1, 3, 0, 0, no),
        ),
    ),
)
