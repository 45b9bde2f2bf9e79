"""The numpy adapter in the conformance table."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from tests.conformance.adapters import NO_TABLES, Array, Difference, Step
from tests.conformance.reported import reported

from gradscale import Policy
from gradscale.numpy import LossScaler


class NumpySession:
    def __init__(self, policy: Policy | str, params: Mapping[str, Array], lr: float) -> None:
        self._scaler = LossScaler(policy)
        self._params = {name: param.copy() for name, param in params.items()}
        self._lr = np.float32(lr)

    def step(self, grads: Mapping[str, Array | None], *, clip_norm: float | None = None, loss: float = 1.0) -> Step:
        result = self._scaler.step(grads, clip_norm=clip_norm, loss=loss)
        applied = None
        if result.applied:
            applied = {name: grad for name, grad in result.grads.items() if grad is not None}
            for name, grad in applied.items():
                self._params[name] = self._params[name] - self._lr * grad
        return Step(self._params, applied, reported(result), result.factor)

    def state(self) -> dict[str, Any]:
        return self._scaler.state.to_dict()

    def metrics(self) -> dict[str, Any]:
        return self._scaler.metrics()


class NumpyAdapter:
    sampled = NO_TABLES
    dtypes = frozenset({"float16", "bfloat16", "float64", "complex64"})
    differs: Mapping[Difference, str] = {}

    def open(self, policy: Policy | str, params: Mapping[str, Array], lr: float) -> NumpySession:
        return NumpySession(policy, params, lr)

    def default(self) -> Policy:
        return LossScaler().policy


ADAPTER = NumpyAdapter()
