"""`gradscale.jax.scaled`, the optax transformation, in the conformance table."""

from collections.abc import Mapping
from typing import Any

import jax  # noqa: TID253
import optax  # noqa: TID253
from tests.conformance.adapters import NO_TABLES, TABLES, Array, Difference
from tests.conformance.jax_adapter import JaxSession, Stepped

from gradscale import Policy
from gradscale.jax import scaled


def step_by_scaled(
    policy: Any, lr: float, opt_state: Any, params: Any, grads: Any, loss: Any, clip_norm: float | None
) -> Stepped:
    updates, opt_state = scaled(optax.sgd(lr), policy, clip_norm).update(grads, opt_state, params, loss=loss)
    applied = jax.tree.map(lambda update: -update / lr, updates)
    return Stepped(optax.apply_updates(params, updates), applied, opt_state, None)


class ScaledAdapter:
    dtypes = frozenset({"float16", "bfloat16", "float64", "complex64"})
    differs: Mapping[Difference, str] = {"result": "a transformation of optax returns updates and its state"}

    def __init__(self, *, compiled: bool) -> None:
        self._compiled = compiled
        self.sampled = TABLES if compiled else NO_TABLES

    def open(self, policy: Policy | str, params: Mapping[str, Array], lr: float) -> JaxSession:
        opt_state = scaled(optax.sgd(lr), policy).init(dict(params))
        return JaxSession(step_by_scaled, (policy, lr), opt_state, params, compiled=self._compiled)

    def default(self) -> Policy:
        state: Any = scaled(optax.sgd(1.0)).init({})
        return state.scaler.policy


ADAPTER = ScaledAdapter(compiled=False)
COMPILED = ScaledAdapter(compiled=True)
