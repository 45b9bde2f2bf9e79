"""Replays thousands of `Dynamic` policies at once, against stepping them one at a time.

Claim:    `replay` runs at least 10 million policy-steps per second on one core, for 1,000 `Dynamic` policies.
Baseline: a Python loop that steps the same policies one at a time through the same rule, `Dynamic.next`.
Machine:  printed with the results. One core: numpy runs the element-wise operations of the rule on one thread.
Command:  python -m benchmarks.bench_replay [--quick]
Caveats:  the baseline steps two of the policies over part of the flags, since stepping all would take minutes. Time for
          stacking the policies is counted. 2% of the steps overflow; where settings differ less, or flags are rarer,
          the branches in numpy's `where` predict better and it runs faster. Seconds are processor time of the one
          thread at work, so that other processes disturb less; on an idle machine that is the time on the clock.
"""

import time
from collections.abc import Callable

import numpy as np
from benchmarks.alone import run_alone
from benchmarks.rows import Row

from gradscale import Dynamic, Seen
from gradscale.replay.run import replay

CLAIM = 10e6
CLAIMED_SIZE = 1_000
SIZES = (1, 1_000, 10_000)
OVERFLOW_RATE = 0.02


def policies(size: int) -> list[Dynamic]:
    """Returns policies that differ in every setting a number can set."""
    return [
        Dynamic(
            init_scale=2.0 ** (8 + i % 12),
            growth_factor=1.5 + i % 3,
            backoff_factor=0.25 + 0.125 * (i % 5),
            growth_interval=10 + i,
            hysteresis=1 + i % 3,
            min_scale=2.0 ** -(i % 4),
            max_scale=2.0 ** (24 + i % 40),
        )
        for i in range(size)
    ]


def step_one_at_a_time(chosen: list[Dynamic], found_inf: np.ndarray) -> None:
    """Steps every policy through the flags, the plain way."""
    for policy in chosen:
        state = policy.start()
        for flag in found_inf:
            state = policy.next(state, Seen(finite=np.bool_(not flag)), np)


def seconds(run: Callable[[], object]) -> float:
    """Returns how much processor time `run` takes."""
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(size: int, steps: int, rounds: int) -> tuple[float, float]:
    """Returns the best policy-steps per second of `replay` and of the loop, measured in turn."""
    found_inf = np.random.default_rng(0).random(steps) < OVERFLOW_RATE
    chosen = policies(size)
    few, short = chosen[:2], found_inf[: min(steps, 500)]
    vectors, loop = [], []
    for _ in range(rounds):
        vectors.append(size * steps / seconds(lambda: replay(chosen, found_inf)))
        loop.append(len(few) * len(short) / seconds(lambda: step_one_at_a_time(few, short)))
    return max(vectors), max(loop)


def check_equal(steps: int = 300) -> None:
    """Raises if the two sides do not give the same scales; a fast wrong answer is no result."""
    found_inf = np.random.default_rng(1).random(steps) < OVERFLOW_RATE
    chosen = policies(20)
    run = replay(chosen, found_inf)
    for column, policy in enumerate(chosen):
        state = policy.start()
        for step, flag in enumerate(found_inf):
            state = policy.next(state, Seen(finite=np.bool_(not flag)), np)
            if run.scales[step, column] != state.scale:
                raise SystemExit(f"replay differs from stepping: {policy}, step {step}")


def rows(quick: bool) -> list[Row]:
    """Returns a row for each number of policies; only one of them has a goal."""
    check_equal()
    return [_row(size, *measure(size, steps=200 if quick else 2_000, rounds=1 if quick else 5)) for size in SIZES]


def _row(size: int, fast: float, slow: float) -> Row:
    return Row(
        f"replay, policies: {size:,}",
        "one at a time",
        measured=fast / 1e6,
        goal=CLAIM / 1e6 if size == CLAIMED_SIZE else None,
        unit="M policy-steps/s",
        at_least=True,
        baseline_measured=slow / 1e6,
    )


if __name__ == "__main__":
    run_alone("Speed of replay", rows)
