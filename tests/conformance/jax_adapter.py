"""The JAX adapter in the conformance table: gradients taken by hand, `Scaler.step` and `apply`."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax  # noqa: TID253
import numpy as np
import optax  # noqa: TID253
from tests.conformance.adapters import NO_TABLES, Array, Difference, Step, Table
from tests.conformance.reported import reported
from tests.jax.versions import enable_x64

from gradscale import Policy
from gradscale.jax import Scaler, StepResult, apply


class Stepped(NamedTuple):
    """What a step function returns.

    Attributes:
        params: the parameters after the step.
        grads: the unscaled gradients, or zeros.
        carry: what goes into the next step.
        result: the result, if there is one.
    """

    params: Any
    grads: Any
    carry: Any
    result: Any


StepFunction = Callable[..., Stepped]
"""Takes settings such as the learning rate, and then `(carry, params, grads, loss, clip_norm)`."""


def step_by_hand(lr: float, scaler: Scaler, params: Any, grads: Any, loss: Any, clip_norm: float | None) -> Stepped:
    unscaled, scaler, result = scaler.step(grads, loss, clip_norm=clip_norm)
    tx = optax.sgd(lr)
    after, _ = apply(tx, unscaled, tx.init(params), params, result)
    return Stepped(after, unscaled, scaler, result)


@functools.cache
def compiled_step(step: StepFunction, *settings: Any) -> StepFunction:
    """Returns the step compiled, the same for all sessions: cases that differ in their numbers only share a program."""
    return jax.jit(functools.partial(step, *settings), static_argnums=4)


class JaxSession:
    """Steps of `step(*settings, carry, params, grads, loss, clip_norm)`, compiled or not."""

    def __init__(
        self, step: StepFunction, settings: Sequence[Any], carry: Any, params: Mapping[str, Array], *, compiled: bool
    ) -> None:
        make = compiled_step if compiled else functools.partial
        self._step: StepFunction = make(step, *settings)
        self._carry = carry
        self._params: dict[str, Any] = dict(params)
        self._last: StepResult | None = None

    @property
    def _scaler(self) -> Scaler:
        return self._carry if isinstance(self._carry, Scaler) else self._carry.scaler

    def step(self, grads: Mapping[str, Array | None], *, clip_norm: float | None = None, loss: float = 1.0) -> Step:
        present = {name: grad for name, grad in grads.items() if grad is not None}
        params = {name: self._params[name] for name in present}
        applied_before = int(self._scaler.state.applied)
        # JAX makes float32 of float64 unless `jax_enable_x64` is set.
        wide = any(param.dtype == np.float64 for param in self._params.values())
        with enable_x64() if wide else contextlib.nullcontext():
            stepped = self._step(self._carry, params, present, np.float32(loss), clip_norm)
        after, unscaled, self._carry, self._last = stepped
        self._params |= {name: np.asarray(param) for name, param in after.items()}
        applied = int(self._scaler.state.applied) > applied_before
        held = {name: np.asarray(grad) for name, grad in unscaled.items()} if applied else None
        return Step(self._params, held, None if self._last is None else reported(self._last))

    def state(self) -> dict[str, Any]:
        return self._scaler.to_dict()["state"]

    def metrics(self) -> dict[str, Any]:
        return {name: np.asarray(value).tolist() for name, value in self._scaler.metrics(self._last).items()}


class JaxAdapter:
    dtypes = frozenset({"float16", "bfloat16", "float64", "complex64"})
    differs: Mapping[Difference, str] = {}

    def __init__(self, *, compiled: bool) -> None:
        self._compiled = compiled
        self.sampled: frozenset[Table] = frozenset({"results"}) if compiled else NO_TABLES

    def open(self, policy: Policy | str, params: Mapping[str, Array], lr: float) -> JaxSession:
        return JaxSession(step_by_hand, (lr,), Scaler(policy), params, compiled=self._compiled)

    def default(self) -> Policy:
        return Scaler().policy


ADAPTER = JaxAdapter(compiled=False)
COMPILED = JaxAdapter(compiled=True)
