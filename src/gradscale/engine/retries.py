"""How often a backward pass may be run again at a lower scale when it overflows."""

import math
from typing import TypeGuard

import numpy as np

from gradscale.policies.contract import Policy
from gradscale.policies.peak import PeakPolicy, search_factor

FIRST_STEPS = 10
"""Applied steps in which a backward pass that overflows is run again by default. From one of them to the next gradients
may grow many times over, and a short run has no step to lose. Later so few steps overflow that they would not repay a
host read and a kept graph in each."""


def check_retries(retries: int) -> None:
    """Raises unless `retries` is an integer that is not negative."""
    if isinstance(retries, bool) or not isinstance(retries, int | np.integer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"`retries` must be an integer. Received: retries={retries!r} ({type(retries).__name__}).")
    if retries < 0:
        raise ValueError(f"`retries` must not be negative. Received: retries={retries!r}.")


def guesses_first_scale(policy: Policy) -> TypeGuard[PeakPolicy]:
    """Returns whether a backward pass that overflows is run again by default, in the first steps of a run.

    So it is for `Headroom` and `LogMax` (`"auto"` is the former). They set the scale by the gradients they have seen,
    so that the first one is a guess, and the next ones rest on few gradients. The first scale of every other policy,
    and of every other system's rule, is one that was asked for, and an overflow skips the step as it does there.
    """
    return isinstance(policy, PeakPolicy)


def first_retries(policy: PeakPolicy, peak: float, applied: float, scale: float) -> int:
    """Returns how often a backward pass may be run again by default; 0 once the first steps are over.

    An overflow lowers the scale by half of the format's range, or to where the largest gradient seen so far keeps 17
    binades: one retry is enough. While no gradient has been seen, every step whose gradients are all zero has raised
    the scale by half of the range, and needs one more. Such steps are applied, and do not end the first steps: the
    first gradient after them overflows.

    Args:
        policy: the policy.
        peak: the peak in its state; 0 while no gradient has been seen.
        applied: steps applied so far.
        scale: the scale of the backward pass.

    >>> policy = PeakPolicy()
    >>> first_retries(policy, 0.0, 0, 2.0**16), first_retries(policy, 0.0, 20, 2.0**48)
    (1, 3)
    >>> first_retries(policy, 1e-3, 9, 2.0**24), first_retries(policy, 1e-3, 10, 2.0**24)
    (1, 0)
    """
    if peak > 0:
        return int(applied < FIRST_STEPS)
    raised = math.log(scale / policy.init_scale, search_factor(policy.format))
    return 1 + max(0, math.ceil(raised))
