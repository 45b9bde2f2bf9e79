"""The PyTorch adapter in the conformance table."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch  # noqa: TID253
from tests.conformance.adapters import Array, Step

from gradscale import Policy
from gradscale.torch import LossScaler


def as_tensor(array: Array) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(array.copy())


class TorchSession:
    def __init__(self, policy: Policy, params: Mapping[str, Array], lr: float) -> None:
        self._scaler = LossScaler(policy=policy)
        self._leaf = torch.zeros((), requires_grad=True)
        self._params = {name: torch.nn.Parameter(as_tensor(param)) for name, param in params.items()}
        # Only the plain loop takes gradients of another type than their parameters.
        self._optimizer = torch.optim.SGD(self._params.values(), lr=lr, foreach=False)

    def step(self, grads: Mapping[str, Array | None], *, clip_norm: float | None = None, loss: float = 1.0) -> Step:
        self._scaler.backward(self._leaf * 0 + loss)
        for name, grad in grads.items():
            if grad is not None:
                tensor = as_tensor(grad)
                self._params[name].grad_dtype = tensor.dtype
                self._params[name].grad = tensor
        result = self._scaler.step(self._optimizer, clip_norm=clip_norm)
        applied = None
        if not result.skipped():
            held = {name: param.grad for name, param in self._params.items()}
            applied = {name: as_array(grad) for name, grad in held.items() if grad is not None}
        params = {name: as_array(param.detach()) for name, param in self._params.items()}
        self._optimizer.zero_grad()
        norm = None if result.grad_norm is None else float(result.grad_norm)
        return Step(result.status, params, applied, norm)

    def state(self) -> dict[str, Any]:
        return self._scaler.state_dict()["state"]


def as_array(tensor: torch.Tensor) -> Array:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


class TorchAdapter:
    # Not float16: what is unscaled stays in `.grad`, which holds no smaller numbers than its type does.
    dtypes = frozenset({"bfloat16", "float64", "complex64"})

    def open(self, policy: Policy, params: Mapping[str, Array], lr: float) -> TorchSession:
        return TorchSession(policy, params, lr)


ADAPTER = TorchAdapter()
