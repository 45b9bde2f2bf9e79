"""jmp: `NoOpLossScale`, `StaticLossScale` and `DynamicLossScale`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gradscale.peers._export import COMMON_SETTINGS, ladder_for, shared_factor, values_of
from gradscale.peers._saved import Imported, given, picked, started
from gradscale.peers._settings import check_float32, check_limit, check_positive
from gradscale.peers.ladder import Ladder, compiled, one_factor_ladder
from gradscale.policies.checks import check_count
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import NoScaling, Static


def dynamic_loss_scale(
    loss_scale: float, counter: int = 0, period: int = 2000, factor: float = 2, min_loss_scale: float = 1.0
) -> Ladder:
    """Returns the rule of `DynamicLossScale` outside `jax.jit`: float32, divided down to a floor, never to infinity."""
    check_float32("loss_scale", loss_scale)
    check_count("period", period)
    check_positive("factor", factor)
    check_limit("min_loss_scale", min_loss_scale)
    if counter:
        check_count("counter", counter)
    return one_factor_ladder(
        loss_scale,
        factor,
        period,
        floor=min_loss_scale,
        refuses_inf=True,
        init_clean_steps=wrapped(counter, period),
        flushes=True,
    )


def jitted_dynamic_loss_scale(
    loss_scale: float, counter: int = 0, period: int = 2000, factor: float = 2, min_loss_scale: float = 1.0
) -> Ladder:
    """Returns the rule of `DynamicLossScale` inside `jax.jit`.

    There `min_loss_scale` becomes 1, and XLA multiplies by 1 / factor to back off.
    """
    # jmp's `tree_unflatten` does not pass `min_loss_scale` on, so the constructor's default applies.
    check_limit("min_loss_scale", min_loss_scale)
    return compiled(dynamic_loss_scale(loss_scale, counter, period, factor))


def wrapped(counter: int, period: int) -> int:
    """Returns the clean steps that `counter` stands for."""
    # jmp grows at `counter == period - 1` and then takes `(counter + 1) % period`: past the period, a counter wraps
    # round without growth.
    return counter if counter < period else (counter + 1) % period - 1


def unwrapped(clean_steps: int, period: int) -> int:
    """Returns a counter that stands for `clean_steps`, which is -1 where the next step must wrap round."""
    return clean_steps if clean_steps >= 0 else 2 * period - 1


def static_loss_scale(loss_scale: float) -> Static:
    """Returns the rule of `StaticLossScale`, which leaves the check to its user; `Static` skips a step by itself."""
    return Static(loss_scale)


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of the leaves `loss_scale` and `counter`; the other fields may be added to them.

    The rule is that of `DynamicLossScale` outside `jax.jit`. A `loss_scale` alone is a `StaticLossScale`, and nothing
    at all a `NoOpLossScale`.
    """
    if not mapping:
        return started(NoScaling())
    if set(mapping) == {"loss_scale"}:
        return started(Static(picked("A jmp StaticLossScale", mapping, ("loss_scale",)).scale("loss_scale")))
    settings = ("period", "factor", "min_loss_scale")
    saved = picked("A jmp DynamicLossScale", mapping, ("loss_scale", "counter"), settings)
    keywords = given(saved, "factor", "min_loss_scale", counts=("period",))
    rule = dynamic_loss_scale(1.0, saved.count("counter"), **keywords)
    return started(replace(rule, init_scale=float(saved.scale32("loss_scale"))))


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns the keywords of the `DynamicLossScale` that continues from `state`, or of one of the other classes.

    The leaves are numpy scalars, which JAX takes for arrays.
    """
    if isinstance(policy, NoScaling):
        return {}
    values = values_of(state)
    if isinstance(policy, Static):
        return {"loss_scale": np.float32(values.scale("scale"))}
    system = "jmp's DynamicLossScale"
    ladder = ladder_for(system, policy, dynamic_loss_scale(1.0), (*COMMON_SETTINGS, "floor"))
    period = int(ladder.growth_interval)
    return {
        "loss_scale": np.float32(values.scale("scale")),
        "counter": np.int32(unwrapped(values.count("clean_steps", lowest=-1), period)),
        "period": period,
        "factor": shared_factor(system, ladder),
        "min_loss_scale": np.float32(ladder.floor),
    }


VARIANTS = {
    "DynamicLossScale": dynamic_loss_scale,
    "DynamicLossScale (jit)": jitted_dynamic_loss_scale,
    "StaticLossScale": static_loss_scale,
    "NoOpLossScale": NoScaling,
}
