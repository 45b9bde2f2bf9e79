"""Loss scaling for PyTorch."""

from gradscale._extras import require

require(__name__, "torch", extra="torch")

from gradscale.torch import compat as compat  # first: it raises where torch is too old for what follows

# isort: split
from gradscale.engine.health import ScaleStuck
from gradscale.engine.probe_report import Verdict
from gradscale.torch.calibrate import calibrate
from gradscale.torch.casting import casts, float_function, half_function, promote_function
from gradscale.torch.drop_in.grad_scaler import GradScaler
from gradscale.torch.drop_in.sharded import ShardedGradScaler
from gradscale.torch.emulation import emulate
from gradscale.torch.masters import MasterWeights
from gradscale.torch.precision.explain import explain
from gradscale.torch.precision.levels import O0, O1, O2, O3, Precision
from gradscale.torch.precision.prepare import prepare
from gradscale.torch.probing.run import probe
from gradscale.torch.ranks.round import ScaleDesync
from gradscale.torch.scaler import LossScaler
from gradscale.torch.step.result import StepResult
from gradscale.torch.watch import Watch, watch

__all__ = [
    "O0",
    "O1",
    "O2",
    "O3",
    "GradScaler",
    "LossScaler",
    "MasterWeights",
    "Precision",
    "ScaleDesync",
    "ScaleStuck",
    "ShardedGradScaler",
    "StepResult",
    "Verdict",
    "Watch",
    "calibrate",
    "casts",
    "emulate",
    "explain",
    "float_function",
    "half_function",
    "prepare",
    "probe",
    "promote_function",
    "watch",
]
