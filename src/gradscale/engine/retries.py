"""How often a backward pass may be run again at a lower scale when it overflows."""

import math
from typing import TypeGuard

import numpy as np

from gradscale.policies.contract import Policy
from gradscale.policies.peak import PeakPolicy, search_factor


def check_retries(retries: int) -> None:
    """Raises unless `retries` is an integer that is not negative."""
    if isinstance(retries, bool) or not isinstance(retries, int | np.integer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"`retries` must be an integer. Received: retries={retries!r} ({type(retries).__name__}).")
    if retries < 0:
        raise ValueError(f"`retries` must not be negative. Received: retries={retries!r}.")


def guesses_first_scale(policy: Policy) -> TypeGuard[PeakPolicy]:
    """Returns whether a backward pass that overflows is run again by default, as long as no gradient has been seen.

    So it is for `Headroom` and `LogMax` (`"auto"` is the former). They set the scale by the gradients they have seen,
    so that the first one is a guess. The first scale of every other policy, and of every other system's rule, is one
    that was asked for, and an overflow skips the step as it does there.
    """
    return isinstance(policy, PeakPolicy)


def first_retries(policy: PeakPolicy, scale: float) -> int:
    """Returns how often a backward pass at `scale` may be run again by default, while no gradient has been seen.

    An overflow lowers the scale by half of the format's range then: one retry is enough from the first scale. Every
    step whose gradients are all zero has raised it by as much, and needs one more.

    >>> first_retries(PeakPolicy(), 2.0**16), first_retries(PeakPolicy(), 2.0**48)
    (1, 3)
    """
    raised = math.log(scale / policy.init_scale, search_factor(policy.format))
    return 1 + max(0, math.ceil(raised))
