"""jmp: `NoOpLossScale`, `StaticLossScale` and `DynamicLossScale`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from gradscale.peers._form import FACTOR, Form, values_of, wrapped
from gradscale.peers._saved import Imported, Saved, started
from gradscale.peers._settings import Count, CountOrZero, Float32, Limit, Positive, checked, static_as
from gradscale.peers.ladder import Ladder, in_graph, one_factor_ladder
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import NoScaling, Static


@checked
def dynamic_loss_scale(
    loss_scale: Float32,
    counter: CountOrZero = 0,
    period: Count = 2000,
    factor: Positive = 2,
    min_loss_scale: Limit = 1.0,
) -> Ladder:
    """Returns the rule of `DynamicLossScale` outside `jax.jit`: float32, divided down to a floor, never to infinity."""
    clean_steps = wrapped(counter, period)
    settings: dict[str, Any] = {
        "floor": min_loss_scale,
        "init_clean_steps": clean_steps,
        "refuses_inf": True,
        "flushes": True,
    }
    return one_factor_ladder(loss_scale, factor, period, **settings)


# jmp's `tree_unflatten` does not pass `min_loss_scale` on, so the constructor's default applies.
jitted_dynamic_loss_scale = in_graph(dynamic_loss_scale, floor=1.0)
"""The rule of `DynamicLossScale` inside `jax.jit`: `min_loss_scale` becomes 1, and XLA multiplies by 1 / factor."""

static_loss_scale = static_as("loss_scale")

_FORM = Form(
    "jmp's DynamicLossScale",
    partial(dynamic_loss_scale, 1.0),
    "loss_scale",
    "counter",
    {"period": "growth_interval", "factor": FACTOR, "min_loss_scale": "floor"},
    wraps=True,
)


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of the leaves `loss_scale` and `counter`; the other fields may be added to them.

    The rule is that of `DynamicLossScale` outside `jax.jit`. A `loss_scale` alone is a `StaticLossScale`, and nothing
    at all a `NoOpLossScale`.
    """
    if not mapping:
        return started(NoScaling())
    if set(mapping) == {"loss_scale"}:
        return started(Static(Saved("jmp's StaticLossScale", mapping).scale("loss_scale")))
    return _FORM.read(mapping)


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns the keywords of the `DynamicLossScale` that continues from `state`, or of one of the other classes.

    The leaves are numpy scalars, which JAX takes for arrays.
    """
    if isinstance(policy, NoScaling):
        return {}
    static = isinstance(policy, Static)
    written = {"loss_scale": values_of(state).scale("scale")} if static else _FORM.write(policy, state)
    types: dict[str, Any] = {"loss_scale": np.float32, "counter": np.int32, "min_loss_scale": np.float32}
    return {key: types.get(key, type(value))(value) for key, value in written.items()}


VARIANTS = {
    "DynamicLossScale": dynamic_loss_scale,
    "DynamicLossScale (jit)": jitted_dynamic_loss_scale,
    "StaticLossScale": static_loss_scale,
    "NoOpLossScale": NoScaling,
}
