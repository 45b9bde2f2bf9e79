"""The MXNet adapter in the conformance table."""

from collections.abc import Mapping
from typing import Any

import mxnet as mx  # noqa: TID253
from mxnet import autograd, gluon, nd  # noqa: TID253
from tests.conformance.adapters import NO_TABLES, Array, Difference, Step
from tests.conformance.reported import reported

from gradscale import Policy
from gradscale.mxnet import LossScaler, init_trainer, scale_loss
from gradscale.peers.specs import as_policy


class MxnetSession:
    """Makes its parameters at the first step: a gradient of MXNet has the type of its parameter."""

    def __init__(self, policy: Policy | str, params: Mapping[str, Array], lr: float) -> None:
        self._policy: Policy | str = policy
        self._lr = lr
        # MXNet has no parameters without elements, so these take no part.
        self._empty = {name: param for name, param in params.items() if not param.size}
        self._start = {name: param for name, param in params.items() if param.size}
        self._params: dict[str, Any] = {}

    def step(self, grads: Mapping[str, Array | None], *, clip_norm: float | None = None, loss: float = 1.0) -> Step:
        if not self._params:
            self._begin(grads)
        present = {name: grad for name, grad in grads.items() if grad is not None and grad.size}
        for name, grad in present.items():
            self._params[name].grad()[:] = nd.array(grad, dtype=grad.dtype)
            self._params[name].data()._fresh_grad = True
        before = self._weights()
        self._scaler.clip_norm = clip_norm
        with autograd.record(), scale_loss(nd.array([loss]), self._trainer):
            pass
        self._trainer.step(1, ignore_stale_grad=True)
        result, after = self._scaler.last, self._weights()
        # What was applied is not kept anywhere, but plain SGD shows it.
        applied = {name: (before[name] - after[name]) / after[name].dtype.type(self._lr) for name in present}
        applied |= {name: param for name, param in self._empty.items() if grads[name] is not None}
        return Step(after | self._empty, applied if result.applied else None, reported(result))

    def state(self) -> dict[str, Any]:
        return self._begun().state.to_dict()

    def metrics(self) -> dict[str, Any]:
        return self._begun().metrics()

    def _begun(self) -> LossScaler:
        """Returns the scaler; before the first step, one like it."""
        return self._scaler if self._params else LossScaler(as_policy(self._policy))

    def _begin(self, grads: Mapping[str, Array | None]) -> None:
        for name, value in self._start.items():
            grad = grads.get(name)
            param = gluon.Parameter(name, shape=value.shape, dtype=value.dtype if grad is None else grad.dtype)
            param.initialize(mx.init.Constant(nd.array(value, dtype=value.dtype)))
            self._params[name] = param
        optimizer = mx.optimizer.SGD(learning_rate=self._lr, multi_precision=True)
        self._trainer = gluon.Trainer(self._params, optimizer)
        self._scaler = init_trainer(self._trainer, self._policy)

    def _weights(self) -> dict[str, Array]:
        """Returns the weights; of those in float16 the float32 masters, once there are any."""
        masters = {
            param.name: self._trainer._updaters[0].states[index][1]
            for index, param in enumerate(self._trainer._params)
            if param.dtype == "float16" and index in self._trainer._updaters[0].states
        }
        weights = {name: masters.get(name, param.data()) for name, param in self._params.items()}
        return {name: weight.asnumpy() for name, weight in weights.items()}


class MxnetAdapter:
    sampled = NO_TABLES
    differs: Mapping[Difference, str] = {}
    dtypes = frozenset({"float16", "float64"})

    def open(self, policy: Policy | str, params: Mapping[str, Array], lr: float) -> MxnetSession:
        return MxnetSession(policy, params, lr)

    def default(self) -> Policy:
        parameter = gluon.Parameter("weight", shape=(1,))
        parameter.initialize()
        return init_trainer(gluon.Trainer({"weight": parameter}, "sgd")).policy


ADAPTER = MxnetAdapter()
