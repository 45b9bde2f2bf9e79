"""Loss scaling for mixed-precision training."""

from typing import TYPE_CHECKING

from gradscale._version import __version__
from gradscale.engine.decide import Outcome, decide
from gradscale.engine.health import Condition, Health
from gradscale.engine.hints import refuse_name
from gradscale.engine.result import Status
from gradscale.formats import BF16, FORMATS, FP4_E2M1, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, Format, get_format
from gradscale.peers import export_state, import_state, preset
from gradscale.policies.contract import Policy, ScaleState, Seen
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.policies.log_max import LogMax
from gradscale.policies.static import CheckOnly, NoScaling, Static
from gradscale.replay.run import Replay, replay

__all__ = [
    "BF16",
    "FORMATS",
    "FP4_E2M1",
    "FP8_E4M3",
    "FP8_E5M2",
    "FP16",
    "FP32",
    "TF32",
    "CheckOnly",
    "Condition",
    "Dynamic",
    "Format",
    "Headroom",
    "Health",
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

if not TYPE_CHECKING:  # a type checker would take any name for known

    def __getattr__(name: str) -> object:
        refuse_name(name, __all__)
