"""tf-keras `mixed_precision.LossScaleOptimizer`, and the loss scales of TF1."""

from collections.abc import Mapping
from typing import Any

from gradscale.peers._form import FACTOR, Form
from gradscale.peers._saved import Imported
from gradscale.peers._settings import Float32, Positive, Whole, checked
from gradscale.peers.ladder import Ladder, in_graph, one_factor_ladder
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import Static

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


@checked
def dynamic_loss_scale(
    initial_loss_scale: Float32 = 2.0**15, increment_period: Whole = 2000, multiplier: Positive = 2.0
) -> Ladder:
    """Returns the rule of TF1's `DynamicLossScale`, run eagerly: float32, divided down to 1, never up to infinity."""
    # TF1 tests `num_good_steps + 1 >= increment_period`, and assigns a grown scale only if it is finite.
    settings = {"overshoot": True, "floor": 1.0, "refuses_inf": True}
    return one_factor_ladder(float(initial_loss_scale), float(multiplier), increment_period, **settings)


dynamic_loss_scale_in_graph = in_graph(dynamic_loss_scale)
"""The rule of `DynamicLossScale` in a graph, where TensorFlow multiplies by 1 / multiplier to back off."""


def fixed_loss_scale(loss_scale_value: float) -> Static:
    """Returns the rule of TF1's `FixedLossScale`, which checks nothing; `Static` still skips a step that overflows."""
    policy = Static(loss_scale_value)
    if policy.scale < 1:
        raise ValueError(f"`loss_scale_value` must be at least 1. Received: loss_scale_value={loss_scale_value!r}.")
    return policy


_TF_KERAS = {"initial_scale": "init_scale", "dynamic_growth_steps": "growth_interval"}
_TF1 = {"initial_loss_scale": "init_scale", "increment_period": "growth_interval", "multiplier": FACTOR}
_KEYS = ("current_loss_scale", "good_steps")


def _rule(**settings: Any) -> Ladder:
    """Returns the rule of settings under the names of either. tf-keras has no multiplier but 2."""
    old_names = dict(zip(_TF_KERAS, _TF1, strict=False))
    return dynamic_loss_scale(**{old_names.get(name, name): value for name, value in settings.items()})


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of `current_loss_scale` and `good_steps`, also as a checkpoint names them.

    The settings are not in a checkpoint. They may be added, as tf-keras or as TF1 calls them in `get_config`.
    """
    variables = {key: value for key, value in mapping.items() if key != _OBJECT_GRAPH}
    return Form("a tf-keras loss scale", _rule, *_KEYS, _TF_KERAS | _TF1).read(variables)


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns the values of the loss scale's two variables, and its settings; TF1's, unless the multiplier is 2."""
    written = Form("tf-keras", _rule, *_KEYS, _TF1).write(policy, state)
    if written["multiplier"] != 2:
        return written
    del written["multiplier"]
    new_names = dict(zip(_TF1, _TF_KERAS, strict=False))
    return {new_names.get(key, key): value for key, value in written.items()}


VARIANTS = {
    "LossScaleOptimizer": loss_scale_optimizer,
    "DynamicLossScale": dynamic_loss_scale,
    "DynamicLossScale (graph)": dynamic_loss_scale_in_graph,
    "FixedLossScale": fixed_loss_scale,
}
