"""Master weights: optimizers for FP16 and BF16 parameters that keep the low bits of every weight and lose no update."""

from gradscale.kernels.torch_storage import Storage, bytes_per_parameter, master_bytes
from gradscale.torch.masters.optimizer import MasterWeights

__all__ = ["MasterWeights", "Storage", "bytes_per_parameter", "master_bytes"]
