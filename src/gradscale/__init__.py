"""Loss scaling for mixed-precision training, done completely."""

from gradscale._version import __version__
from gradscale.decide import decide
from gradscale.formats import BF16, FORMATS, FP4_E2M1, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, Format, get_format
from gradscale.peers import export_state, import_state, preset
from gradscale.policy import Dynamic, NoScaling, Policy, Static
from gradscale.predictive import Headroom, Histogram, LogMax
from gradscale.replay import Replay, replay
from gradscale.state import Outcome, ScaleState, Seen, Status

__all__ = [
    "BF16",
    "FORMATS",
    "FP4_E2M1",
    "FP8_E4M3",
    "FP8_E5M2",
    "FP16",
    "FP32",
    "TF32",
    "Dynamic",
    "Format",
    "Headroom",
    "Histogram",
    "LogMax",
    "NoScaling",
    "Outcome",
    "Policy",
    "Replay",
    "ScaleState",
    "Seen",
    "Static",
    "Status",
    "__version__",
    "decide",
    "export_state",
    "get_format",
    "import_state",
    "preset",
    "replay",
]
