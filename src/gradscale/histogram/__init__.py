"""Exponent histograms: how large gradients are, what a format and a scale would lose of them, and the best scale."""

from gradscale.histogram.calibration import (
    Calibration,
    LayerCalibration,
    ScaleLosses,
    best_static_scale,
    calibration_of,
    safe_bits,
)
from gradscale.histogram.counts import EXPONENTS, ExponentHistogram, block_histogram, exponent_histogram
from gradscale.histogram.losses import Losses, losses, lost_share, overflow_share, subnormal_share

__all__ = [
    "EXPONENTS",
    "Calibration",
    "ExponentHistogram",
    "LayerCalibration",
    "Losses",
    "ScaleLosses",
    "best_static_scale",
    "block_histogram",
    "calibration_of",
    "exponent_histogram",
    "losses",
    "lost_share",
    "overflow_share",
    "safe_bits",
    "subnormal_share",
]
