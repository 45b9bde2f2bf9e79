"""How often a backward pass may be run again at a lower scale when it overflows."""

import numpy as np


def check_retries(retries: int) -> None:
    """Raises unless `retries` is an integer that is not negative."""
    if isinstance(retries, bool) or not isinstance(retries, int | np.integer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"`retries` must be an integer. Received: retries={retries!r} ({type(retries).__name__}).")
    if retries < 0:
        raise ValueError(f"`retries` must not be negative. Received: retries={retries!r}.")
