"""The PyTorch adapter in the conformance table, with each way that torch runs an optimizer."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch  # noqa: TID253
from tests.conformance.adapters import NO_TABLES, Array, Difference, Step
from tests.conformance.reported import reported

from gradscale import Policy
from gradscale.engine.saved import opened
from gradscale.torch import LossScaler
from gradscale.torch.compat import has_grad_dtype

# Not float16: what is unscaled stays in `.grad`, which holds no smaller numbers than its type does.
# Only the plain loop takes gradients of another type than their parameters, and only where torch can have them.
FOREACH_TYPES = frozenset({"float64", "complex64"})
PLAIN_TYPES = FOREACH_TYPES | ({"bfloat16"} if has_grad_dtype() else set())
FUSED_TYPES = FOREACH_TYPES - {"complex64"}


def as_tensor(array: Array) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(array.copy())


def as_array(tensor: torch.Tensor) -> Array:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


class Model:
    """Parameters with an optimizer, and gradients given by hand."""

    def __init__(self, params: Mapping[str, Array], lr: float, kind: Mapping[str, bool]) -> None:
        self.params = {name: torch.nn.Parameter(as_tensor(param)) for name, param in params.items()}
        self.optimizer = torch.optim.SGD(list(self.params.items()), lr=lr, **kind)
        self._leaf = torch.zeros((), requires_grad=True)

    def loss(self, value: float) -> torch.Tensor:
        """Returns a loss whose backward pass reaches none of the parameters."""
        return self._leaf * 0 + value

    def give(self, grads: Mapping[str, Array | None]) -> None:
        for name, grad in grads.items():
            if grad is not None:
                tensor = as_tensor(grad)
                if has_grad_dtype():
                    self.params[name].grad_dtype = tensor.dtype
                self.params[name].grad = tensor

    def after(self, result: Any) -> Step:
        """Returns what a step left behind, and clears the gradients."""
        found = None if result is None else reported(result)
        applied = None
        if found is None or found.applied:
            held = {name: param.grad for name, param in self.params.items()}
            applied = {name: as_array(grad) for name, grad in held.items() if grad is not None}
        params = {name: as_array(param.detach()) for name, param in self.params.items()}
        self.optimizer.zero_grad()
        return Step(params, applied, found)


class TorchSession:
    def __init__(self, policy: Policy | str, params: Mapping[str, Array], lr: float, kind: Mapping[str, bool]) -> None:
        self._model = Model(params, lr, kind)
        self._scaler = LossScaler(torch.nn.ParameterDict(self._model.params), policy)

    def step(self, grads: Mapping[str, Array | None], *, clip_norm: float | None = None, loss: float = 1.0) -> Step:
        self._scaler.backward(self._model.loss(loss))
        self._model.give(grads)
        return self._model.after(self._scaler.step(self._model.optimizer, clip_norm=clip_norm))

    def state(self) -> dict[str, Any]:
        return opened(self._scaler.state_dict())["state"]

    def metrics(self) -> dict[str, Any]:
        return self._scaler.metrics()


class TorchAdapter:
    sampled = NO_TABLES
    differs: Mapping[Difference, str] = {}

    def __init__(self, dtypes: frozenset[str], **kind: bool) -> None:
        self.dtypes = dtypes
        self._kind = kind

    def open(self, policy: Policy | str, params: Mapping[str, Array], lr: float) -> TorchSession:
        return TorchSession(policy, params, lr, self._kind)

    def default(self) -> Policy:
        return LossScaler().policy


ADAPTER = TorchAdapter(PLAIN_TYPES, foreach=False)
FOREACH = TorchAdapter(FOREACH_TYPES, foreach=True)
FUSED = TorchAdapter(FUSED_TYPES, fused=True)
