"""The JAX adapter in the conformance table, run operation by operation."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax  # noqa: TID253
import numpy as np
import optax  # noqa: TID253
from tests.conformance.adapters import Array, Step

from gradscale import Policy
from gradscale.jax import Scaler, StepResult, apply

Moved = tuple[dict[str, Any], dict[str, Any], Scaler, StepResult]


def moved(lr: float, scaler: Scaler, params: Any, grads: Any, loss: Any, clip_norm: float | None) -> Moved:
    true, scaler, result = scaler.step(grads, loss, clip_norm=clip_norm)
    tx = optax.sgd(lr)
    after, _ = apply(tx, true, tx.init(params), params, result)
    return after, true, scaler, result


class JaxSession:
    def __init__(self, policy: Policy, params: Mapping[str, Array], lr: float, *, compiled: bool) -> None:
        self._scaler = Scaler(policy)
        self._params: dict[str, Any] = dict(params)
        step = functools.partial(moved, lr)
        self._moved: Callable[..., Moved] = jax.jit(step, static_argnums=4) if compiled else step

    def step(self, grads: Mapping[str, Array | None], *, clip_norm: float | None = None, loss: float = 1.0) -> Step:
        present = {name: grad for name, grad in grads.items() if grad is not None}
        params = {name: self._params[name] for name in present}
        # JAX makes float32 of float64 unless it is told not to.
        wide = any(param.dtype == np.float64 for param in self._params.values())
        with jax.enable_x64(True) if wide else contextlib.nullcontext():
            after, true, self._scaler, result = self._moved(self._scaler, params, present, np.float32(loss), clip_norm)
        self._params |= {name: np.asarray(param) for name, param in after.items()}
        applied = {name: np.asarray(grad) for name, grad in true.items()} if result.status == "applied" else None
        norm = None if result.grad_norm is None else float(result.grad_norm)
        return Step(result.status, self._params, applied, norm)

    def state(self) -> dict[str, Any]:
        return self._scaler.to_dict()["state"]


class JaxAdapter:
    dtypes = frozenset({"float16", "bfloat16", "float64", "complex64"})

    def __init__(self, *, compiled: bool) -> None:
        self._compiled = compiled

    def open(self, policy: Policy, params: Mapping[str, Array], lr: float) -> JaxSession:
        return JaxSession(policy, params, lr, compiled=self._compiled)


ADAPTER = JaxAdapter(compiled=False)
