"""Loss scaling for PyTorch."""

from gradscale.torch.grad_scaler import GradScaler
from gradscale.torch.result import Culprit, StepResult
from gradscale.torch.scaler import LossScaler
from gradscale.torch.stuck import ScaleStuck

__all__ = ["Culprit", "GradScaler", "LossScaler", "ScaleStuck", "StepResult"]
