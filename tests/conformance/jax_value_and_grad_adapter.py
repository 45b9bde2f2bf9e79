"""`gradscale.jax.value_and_grad` and `apply` in the conformance table."""

from collections.abc import Mapping
from typing import Any

import jax  # noqa: TID253
import optax  # noqa: TID253
from tests.conformance.adapters import NO_TABLES, TABLES, Array, Difference
from tests.conformance.jax_adapter import JaxSession, Stepped

from gradscale import Policy
from gradscale.jax import Scaler, apply, value_and_grad


@jax.custom_vjp
def given(params: Any, grads: Any, loss: Any) -> Any:
    """Returns `loss`. Its backward pass returns `grads`, which are scaled already, whatever it starts from."""
    del params, grads
    return loss


def _forward(params: Any, grads: Any, loss: Any) -> tuple[Any, Any]:
    del params
    return loss, grads


def _backward(grads: Any, start: Any) -> tuple[Any, None, None]:
    del start
    return grads, None, None


given.defvjp(_forward, _backward)


def step_by_value_and_grad(
    lr: float, scaler: Scaler, params: Any, grads: Any, loss: Any, clip_norm: float | None
) -> Stepped:
    _, unscaled, scaler, result = value_and_grad(given, clip_norm=clip_norm)(scaler, params, grads, loss)
    tx = optax.sgd(lr)
    after, _ = apply(tx, unscaled, tx.init(params), params, result)
    return Stepped(after, unscaled, scaler, result)


class ValueAndGradAdapter:
    # Not those that are narrower than the parameters: what JAX differentiates has gradients of its own type.
    dtypes = frozenset({"float64", "complex64"})
    differs: Mapping[Difference, str] = {}

    def __init__(self, *, compiled: bool) -> None:
        self._compiled = compiled
        self.sampled = TABLES if compiled else NO_TABLES

    def open(self, policy: Policy | str, params: Mapping[str, Array], lr: float) -> JaxSession:
        return JaxSession(step_by_value_and_grad, (lr,), Scaler(policy), params, compiled=self._compiled)

    def default(self) -> Policy:
        return Scaler().policy


ADAPTER = ValueAndGradAdapter(compiled=False)
COMPILED = ValueAndGradAdapter(compiled=True)
