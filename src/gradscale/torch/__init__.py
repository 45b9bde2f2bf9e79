"""Loss scaling for PyTorch."""

from gradscale.stuck import ScaleStuck
from gradscale.torch.casting import casts, float_function, half_function, promote_function
from gradscale.torch.emulation import emulate
from gradscale.torch.explain import explain
from gradscale.torch.explanation import Explanation
from gradscale.torch.grad_scaler import GradScaler
from gradscale.torch.masters import MasterWeights
from gradscale.torch.precision import O0, O1, O2, O3, Precision
from gradscale.torch.prepare import prepare
from gradscale.torch.result import Culprit, StepResult
from gradscale.torch.scaler import LossScaler

__all__ = [
    "O0",
    "O1",
    "O2",
    "O3",
    "Culprit",
    "Explanation",
    "GradScaler",
    "LossScaler",
    "MasterWeights",
    "Precision",
    "ScaleStuck",
    "StepResult",
    "casts",
    "emulate",
    "explain",
    "float_function",
    "half_function",
    "prepare",
    "promote_function",
]
