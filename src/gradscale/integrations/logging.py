"""What every trainer's loggers are given of a scaler: its metrics, under names that no metric of a model has."""

import math
from collections.abc import Mapping

PREFIX = "gradscale/"
"""Loggers group metrics by the part of their name before a slash."""

GRAD_NORM = f"{PREFIX}grad_norm"


def logged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the `metrics()` of a scaler as a logger takes them; those that are not known are left out.

    >>> logged({"scale": 1024.0, "grad_norm": float("nan")})
    {'gradscale/scale': 1024.0}
    """
    return {PREFIX + name: value for name, value in metrics.items() if not math.isnan(value)}
