"""Autocast of the simulated device: the operators that the tests use, by the lists of CUDA."""

from typing import Any

import torch
from tests.torch.sim.kernels import NAME, Kernel
from torch import Tensor
from torch.utils._pytree import tree_map_only

NARROW = ("linear", "matmul", "mm", "addmm", "bmm", "conv1d", "conv2d")
WIDE = ("mse_loss", "cross_entropy_loss", "layer_norm", "softmax.int", "log_softmax.int")

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # pyright: ignore[reportAttributeAccessIssue]


def casting(op: Any, wide: bool) -> Kernel:
    """Returns a kernel that casts its arguments to float32 if `wide`, else to autocast's type, and runs `op`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.float32 if wide else torch.get_autocast_dtype(NAME)

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):  # pyright: ignore[reportAttributeAccessIssue]
            return op(*tree_map_only(Tensor, cast, args), **tree_map_only(Tensor, cast, kwargs))

    return run
