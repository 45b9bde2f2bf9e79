"""Keras 3: `keras.optimizers.LossScaleOptimizer`."""

from collections.abc import Mapping
from typing import Any, cast

from gradscale.peers._export import ladder_for, values_of
from gradscale.peers._saved import Imported, given, picked, started
from gradscale.peers._settings import check_float32
from gradscale.peers.ladder import Ladder
from gradscale.policies.checks import check_count
from gradscale.policies.contract import Policy, ScaleState

_WHAT = "A Keras LossScaleOptimizer"
_INDICES = {"2": "step_counter", "3": "dynamic_scale"}
"""Positions of the optimizer's own variables among those it saves; iteration and learning rate come first."""


def loss_scale_optimizer(initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000) -> Ladder:
    """Returns the rule of `LossScaleOptimizer`: doubles and halves in float32, with no bound and no guard.

    The scale can reach infinity or zero, and then never changes. It reaches zero below 2**-126, as on Keras's JAX and
    TensorFlow backends on a CPU, which flush subnormal numbers; other devices halve 23 times more.
    """
    check_float32("initial_scale", initial_scale)
    check_count("dynamic_growth_steps", dynamic_growth_steps)
    # Keras compares its counter with `dynamic_growth_steps - 1` before it counts the step, so there is no off-by-one.
    return Ladder(init_scale=initial_scale, growth_interval=dynamic_growth_steps, flushes=True)


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of the optimizer's variables: by index, as `save_own_variables`, or by name.

    Takes the variables alone, under `vars`, or in the `optimizer` of a weights file. The settings are not among them;
    `initial_scale` and `dynamic_growth_steps`, as `get_config` has them, may be added.
    """
    settings = ("initial_scale", "dynamic_growth_steps")
    saved = picked(_WHAT, _by_name(mapping), tuple(_INDICES.values()), settings)
    policy = loss_scale_optimizer(**given(saved, "initial_scale", counts=("dynamic_growth_steps",)))
    return started(policy, scale=saved.scale("dynamic_scale"), clean_steps=saved.count("step_counter"))


def _by_name(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the variables of the optimizer, and no other numbered ones, by name."""
    for key in ("optimizer", "vars"):
        if isinstance(inner := mapping.get(key), Mapping):
            mapping = cast("Mapping[str, Any]", inner)
    named = {_INDICES.get(str(key), str(key)): value for key, value in mapping.items()}
    return {name: value for name, value in named.items() if not name.isdecimal()}


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns the values of the optimizer's two variables, and its two settings, by name."""
    ladder = ladder_for("Keras's LossScaleOptimizer", policy, loss_scale_optimizer(), ("growth_interval",))
    values = values_of(state)
    return {
        "step_counter": values.count("clean_steps"),
        "dynamic_scale": values.scale("scale"),
        "initial_scale": float(ladder.init_scale),
        "dynamic_growth_steps": int(ladder.growth_interval),
    }


VARIANTS = {"LossScaleOptimizer": loss_scale_optimizer}
