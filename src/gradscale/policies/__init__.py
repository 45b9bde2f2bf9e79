"""The rules that change a scale, and the contract they share."""

from gradscale.policies.contract import Policy, ScaleState, Seen
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.headroom import Headroom, HeadroomState
from gradscale.policies.histogram import Histogram, HistogramState
from gradscale.policies.log_max import LogMax, LogMaxState
from gradscale.policies.static import CheckOnly, NoScaling, Static

__all__ = [
    "CheckOnly",
    "Dynamic",
    "Headroom",
    "HeadroomState",
    "Histogram",
    "HistogramState",
    "LogMax",
    "LogMaxState",
    "NoScaling",
    "Policy",
    "ScaleState",
    "Seen",
    "Static",
]
