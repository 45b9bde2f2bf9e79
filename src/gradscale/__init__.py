"""Loss scaling for mixed-precision training."""

from typing import TYPE_CHECKING

from gradscale._version import __version__ as __version__
from gradscale.engine.hints import refuse_name
from gradscale.engine.result import Status
from gradscale.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, Format
from gradscale.peers import export_state, import_state, preset
from gradscale.policies.contract import Policy, ScaleState, Seen
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.policies.log_max import LogMax
from gradscale.policies.static import CheckOnly, NoScaling, Static
from gradscale.replay.run import replay

__all__ = [
    "BF16",
    "FP8_E4M3",
    "FP8_E5M2",
    "FP16",
    "FP32",
    "CheckOnly",
    "Dynamic",
    "Format",
    "Headroom",
    "Histogram",
    "LogMax",
    "NoScaling",
    "Policy",
    "ScaleState",
    "Seen",
    "Static",
    "Status",
    "export_state",
    "import_state",
    "preset",
    "replay",
]

if not TYPE_CHECKING:  # a type checker would take any name for known

    def __getattr__(name: str) -> object:
        refuse_name(name, __all__)
