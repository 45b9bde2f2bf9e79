"""Agree: one measurement for all gradients of a step."""

import math
from collections.abc import Sequence

import numpy as np

from gradscale.engine.measurement import LARGEST_NORM, Measurement
from gradscale.engine.plan import Plan
from gradscale.numpy.measure import ArrayMeasurement


def agree(measured: Sequence[ArrayMeasurement], plan: Plan) -> Measurement:
    """Returns one measurement for all arrays of a step: it is not finite if one of them is not."""
    sizes = np.array([one.amax for one in measured])
    amax = np.max(sizes)
    share = sum(one.above for one in measured) / max(1, sum(one.size for one in measured))
    return Measurement(
        sizes=sizes,
        total=amax,
        amax=amax,
        norm=_norm(measured) if plan.norm else None,
        upper_share=None if plan.edge is None else np.float32(share),
    )


def _norm(measured: Sequence[ArrayMeasurement]) -> np.float64:
    """Returns the norm over all arrays; inf where its square does not fit float32, as on a device."""
    norm = math.hypot(*(one.norm for one in measured))
    return np.float64(norm if norm < LARGEST_NORM else math.inf)
