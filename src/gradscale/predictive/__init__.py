"""Policies that look at the size of the gradients, not only at whether they overflowed."""

from gradscale.predictive.headroom import Headroom, HeadroomState
from gradscale.predictive.histogram import Histogram, HistogramState
from gradscale.predictive.logmax import LogMax, LogMaxState

__all__ = ["Headroom", "HeadroomState", "Histogram", "HistogramState", "LogMax", "LogMaxState"]
