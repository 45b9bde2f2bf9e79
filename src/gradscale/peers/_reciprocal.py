"""Systems with one factor for both directions, which back off by its reciprocal or by dividing."""

import math

import numpy as np

from gradscale.peers._ladder import Ladder


def reciprocal(factor: float) -> float:
    """Returns 1 / `factor` as float32 rounds it: what compilers of graphs multiply by where a program divides."""
    return float(np.float32(1) / np.float32(factor))


def one_factor(system: str, ladder: Ladder) -> float:
    """Returns the factor by which `ladder` both grows and backs off.

    Raises:
        ValueError: it backs off by another factor than it grows by.
    """
    growth, backoff = float(ladder.growth_factor), ladder.backoff_factor / ladder.backoff_divisor
    if not math.isclose(growth * backoff, 1, rel_tol=2.0**-23):  # either may have been rounded to float32
        raise ValueError(
            f"{system} grows and backs off by one factor. "
            f"Received: growth_factor={growth!r}, backoff_factor={backoff!r}."
        )
    return growth
