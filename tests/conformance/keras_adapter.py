"""The Keras adapter in the conformance table, on the backend that Keras was set up with."""

import warnings
from collections.abc import Mapping
from typing import Any

import keras  # noqa: TID253
import numpy as np
from tests.conformance.adapters import NO_TABLES, Array, Difference, Step
from tests.conformance.reported import reported

from gradscale import Policy
from gradscale.keras import LossScaleOptimizer, StepResult


class KerasSession:
    def __init__(self, policy: Policy | str, params: Mapping[str, Array], lr: float) -> None:
        self._lr = lr
        self._optimizer = LossScaleOptimizer(keras.optimizers.SGD(lr), policy=policy)
        self._variables = {
            name: keras.Variable(param, dtype=param.dtype.name, name=name) for name, param in params.items()
        }
        self._optimizer.build(list(self._variables.values()))
        self._last: StepResult | None = None

    def step(self, grads: Mapping[str, Array | None], *, clip_norm: float | None = None, loss: float = 1.0) -> Step:
        before = self._params()
        self._optimizer.inner_optimizer.global_clipnorm = clip_norm
        tensors = [None if grad is None else keras.ops.convert_to_tensor(grad) for grad in grads.values()]
        self._optimizer.scale_loss(np.float32(loss))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Gradients do not exist for variables")
            result = self._last = self._optimizer.apply_if_finite(
                tensors, list(self._variables.values()), norm=clip_norm is not None
            )
        after = self._params()
        # What was applied shows only in what it did.
        present = [name for name, grad in grads.items() if grad is not None]
        applied = {name: (before[name] - after[name]) / self._lr for name in present}
        found = reported(result)
        return Step(after, applied if found.applied else None, found)

    def state(self) -> dict[str, Any]:
        return self._optimizer.state.to_dict()

    def metrics(self) -> dict[str, Any]:
        return self._optimizer.metrics(self._last)

    def _params(self) -> dict[str, Array]:
        return {
            name: np.array(keras.ops.convert_to_numpy(variable.value)) for name, variable in self._variables.items()
        }


class KerasAdapter:
    sampled = NO_TABLES
    differs: Mapping[Difference, str] = {}

    def open(self, policy: Policy | str, params: Mapping[str, Array], lr: float) -> KerasSession:
        return KerasSession(policy, params, lr)

    def default(self) -> Policy:
        return LossScaleOptimizer(keras.optimizers.SGD()).policy


ADAPTER = KerasAdapter()
