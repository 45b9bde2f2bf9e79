"""Remember: what a dashboard shows of a scaler, under the same names on every adapter."""

import math
from typing import Any

import numpy as np

from gradscale.formats import FP16
from gradscale.policies.arithmetic import larger
from gradscale.policies.contract import ScaleState
from gradscale.record import Array

METRICS = ("scale", "applied", "skipped", "skip_rate", "grad_norm", "headroom_bits")
"""The keys of every adapter's `metrics()`."""


def metrics_of(state: ScaleState, grad_norm: Array | None, amax: Array | None, xp: Any) -> dict[str, Any]:
    """Returns scale, counts, skip rate, gradient norm and headroom, in arrays of `xp`; NaN where one is not known.

    `headroom_bits` is how often the scale could double before the largest gradient overflows FP16. `grad_norm` and
    `amax` are those of the last step, unscaled, where they were measured.
    """
    # `log2` may be off in its last bits: fine for a dashboard, where a rule could not use it.
    unknown = state.scale * 0 + math.nan
    peak = unknown if amax is None else amax * state.scale
    known = xp.logical_and(peak > 0, xp.isfinite(peak))
    return {
        "scale": state.scale,
        "applied": state.applied,
        "skipped": state.skipped,
        "skip_rate": state.skipped / larger(state.applied + state.skipped, 1, xp),
        "grad_norm": unknown if grad_norm is None else grad_norm,
        "headroom_bits": xp.where(known, xp.log2(FP16.max / xp.where(known, peak, 1.0)), math.nan),
    }


def summary_of(state: ScaleState) -> str:
    """Returns the scale and the skips of a state in host memory, as a short text for a progress bar.

    >>> from gradscale.policies.dynamic import Dynamic
    >>> summary_of(Dynamic(init_scale=2.0**14).start())
    'scale 2^14, 0 skipped'
    """
    mantissa, exponent = math.frexp(state.scale)
    scale = f"2^{exponent - 1}" if mantissa == 0.5 else f"{state.scale:g}"
    return f"scale {scale}, {state.skipped} skipped"


def host_metrics(state: ScaleState, grad_norm: Any, amax: Any) -> dict[str, float]:
    """Returns the same as Python numbers.

    Args:
        state: the state of the scale, as numpy scalars.
        grad_norm: as above, a number in host memory.
        amax: as above, a number in host memory.
    """
    # Times a Python number or a float32, the scale stays a float32, which the product may exceed.
    wide = None if amax is None else np.float64(amax)
    return {name: float(value) for name, value in metrics_of(state, grad_norm, wide, np).items()}
