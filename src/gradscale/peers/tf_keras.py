"""tf-keras `mixed_precision.LossScaleOptimizer`, and the loss scales of TF1."""

from collections.abc import Mapping
from typing import Any

from gradscale.peers._export import COMMON_SETTINGS, ladder_for, shared_factor, values_of
from gradscale.peers._saved import Imported, given, picked, started
from gradscale.peers._settings import check_float32, check_positive, whole
from gradscale.peers.ladder import Ladder, compiled, one_factor_ladder
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import Static

_SETTINGS = {
    "initial_scale": "initial_loss_scale",
    "dynamic_growth_steps": "increment_period",
    "multiplier": "multiplier",
}
"""What tf-keras calls the settings of TF1's `DynamicLossScale`; it has no multiplier but 2."""

_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""The one entry of a TensorFlow checkpoint that is not a variable."""


def loss_scale_optimizer(
    dynamic: bool = True, initial_scale: float | None = None, dynamic_growth_steps: int | None = None
) -> Ladder | Static:
    """Returns the rule of `LossScaleOptimizer`: that of `DynamicLossScale` with a multiplier of 2, or a fixed scale.

    With `dynamic=False` tf-keras checks nothing; `Static` still skips a step that overflows.
    """
    if dynamic:
        return dynamic_loss_scale(
            2.0**15 if initial_scale is None else initial_scale,
            2000 if dynamic_growth_steps is None else dynamic_growth_steps,
        )
    if initial_scale is None or dynamic_growth_steps is not None:
        raise ValueError(
            "`dynamic=False` takes `initial_scale`, the fixed scale, and no `dynamic_growth_steps`. Received: "
            f"initial_scale={initial_scale!r}, dynamic_growth_steps={dynamic_growth_steps!r}."
        )
    return Static(initial_scale)


def dynamic_loss_scale(
    initial_loss_scale: float = 2.0**15, increment_period: int = 2000, multiplier: float = 2.0
) -> Ladder:
    """Returns the rule of TF1's `DynamicLossScale`, run eagerly: float32, divided down to 1, never up to infinity."""
    check_float32("initial_loss_scale", initial_loss_scale)
    check_positive("multiplier", multiplier)
    interval = whole("increment_period", increment_period)
    # TF1 tests `num_good_steps + 1 >= increment_period`, and assigns a grown scale only if it is finite.
    settings = {"overshoot": True, "floor": 1.0, "refuses_inf": True}
    return one_factor_ladder(float(initial_loss_scale), float(multiplier), interval, **settings)


def dynamic_loss_scale_in_graph(
    initial_loss_scale: float = 2.0**15, increment_period: int = 2000, multiplier: float = 2.0
) -> Ladder:
    """Returns the rule of `DynamicLossScale` in a graph, where TensorFlow multiplies by 1 / multiplier to back off."""
    return compiled(dynamic_loss_scale(initial_loss_scale, increment_period, multiplier))


def fixed_loss_scale(loss_scale_value: float) -> Static:
    """Returns the rule of TF1's `FixedLossScale`, which checks nothing; `Static` still skips a step that overflows."""
    policy = Static(loss_scale_value)
    if policy.scale < 1:
        raise ValueError(f"`loss_scale_value` must be at least 1. Received: loss_scale_value={loss_scale_value!r}.")
    return policy


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of `current_loss_scale` and `good_steps`, also as a checkpoint names them.

    The settings are not in a checkpoint. They may be added, as tf-keras or as TF1 calls them in `get_config`.
    """
    names = {**{name: name for name in _SETTINGS.values()}, **_SETTINGS}
    variables = {key: value for key, value in mapping.items() if key != _OBJECT_GRAPH}
    saved = picked("A tf-keras loss scale", variables, ("current_loss_scale", "good_steps"), tuple(names))
    settings = given(saved, "initial_scale", "initial_loss_scale", "multiplier")
    settings |= given(saved, counts=("dynamic_growth_steps", "increment_period"))
    policy = dynamic_loss_scale(**{names[name]: value for name, value in settings.items()})
    return started(policy, scale=saved.scale("current_loss_scale"), clean_steps=saved.count("good_steps"))


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns the values of the loss scale's two variables, and its settings; TF1's, unless the multiplier is 2."""
    system = "tf-keras"
    ladder = ladder_for(system, policy, dynamic_loss_scale(), COMMON_SETTINGS)
    multiplier, values = shared_factor(system, ladder), values_of(state)
    written = {
        "current_loss_scale": values.scale("scale"),
        "good_steps": values.count("clean_steps"),
        "initial_scale": float(ladder.init_scale),
        "dynamic_growth_steps": int(ladder.growth_interval),
        "multiplier": multiplier,
    }
    if multiplier == 2:
        return {key: value for key, value in written.items() if key != "multiplier"}
    return {_SETTINGS.get(key, key): value for key, value in written.items()}


VARIANTS = {
    "LossScaleOptimizer": loss_scale_optimizer,
    "DynamicLossScale": dynamic_loss_scale,
    "DynamicLossScale (graph)": dynamic_loss_scale_in_graph,
    "FixedLossScale": fixed_loss_scale,
}
