"""Checks of the settings that predictive policies share. Each sets what it checked, rounded as the rule uses it."""

from typing import Any

from gradscale.formats import Format
from gradscale.policy import as_single

MOST_BITS = 15


def check_format(policy: Any) -> None:
    """Raises unless `policy.format` is a `Format`."""
    if not isinstance(policy.format, Format):
        raise TypeError(
            f"`format` must be a Format, such as `gradscale.FP16`. Received: format={policy.format!r}. "
            "`gradscale.get_format` finds one by its name or dtype."
        )


def check_bits(policy: Any, *names: str) -> None:
    """Raises unless the settings are whole numbers from 0 to 15; makes floats of them.

    Whole, because only then is 2**bits the same on every framework, and scales are.
    """
    for name in names:
        bits = as_single(name, getattr(policy, name))
        if not (0 <= bits <= MOST_BITS and bits.is_integer()):
            raise ValueError(
                f"`{name}` must be a whole number from 0 to {MOST_BITS}. Received: {name}={getattr(policy, name)!r}."
            )
        object.__setattr__(policy, name, bits)


def check_share(policy: Any, *names: str) -> None:
    """Raises unless the settings are at least 0 and below 1; rounds them to float32."""
    for name in names:
        share = as_single(name, getattr(policy, name))
        if not 0 <= share < 1:
            raise ValueError(f"`{name}` must be at least 0 and below 1. Received: {name}={getattr(policy, name)!r}.")
        object.__setattr__(policy, name, share)
