"""How often a backward pass may be run again at a lower scale when it overflows."""

import numpy as np

from gradscale.policies.contract import Policy
from gradscale.policies.peak import PeakPolicy


def check_retries(retries: int) -> None:
    """Raises unless `retries` is an integer that is not negative."""
    if isinstance(retries, bool) or not isinstance(retries, int | np.integer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"`retries` must be an integer. Received: retries={retries!r} ({type(retries).__name__}).")
    if retries < 0:
        raise ValueError(f"`retries` must not be negative. Received: retries={retries!r}.")


def first_retries(policy: Policy) -> int:
    """Returns how often a backward pass may be run again by default, as long as no step has been applied.

    Once for `Headroom` and `LogMax` (`"auto"` is the former). They set the scale by the gradients they have seen, so
    that the first one is a guess, and an overflow before any gradient was seen lowers it by half of the format's range:
    one retry is enough. The first scale of every other policy, and of every other system's rule, is one that was asked
    for, and an overflow skips the step as it does there.
    """
    return int(isinstance(policy, PeakPolicy))
