"""Keras 3: `keras.optimizers.LossScaleOptimizer`."""

from collections.abc import Mapping
from typing import Any, cast

from gradscale.peers._form import Form
from gradscale.peers._saved import Imported
from gradscale.peers._settings import Count, Float32, checked
from gradscale.peers.ladder import Ladder

_INDICES = {"2": "step_counter", "3": "dynamic_scale"}
"""Positions of the optimizer's own variables among those it saves; iteration and learning rate come first."""


@checked
def loss_scale_optimizer(initial_scale: Float32 = 2.0**15, dynamic_growth_steps: Count = 2000) -> Ladder:
    """Returns the rule of `LossScaleOptimizer`: doubles and halves in float32, with no bound and no guard.

    The scale can reach infinity or zero, and then never changes. It reaches zero below 2**-126, as on Keras's JAX and
    TensorFlow backends on a CPU, which flush subnormal numbers; other devices halve 23 times more.
    """
    # Keras compares its counter with `dynamic_growth_steps - 1` before it counts the step, so there is no off-by-one.
    return Ladder(init_scale=initial_scale, growth_interval=dynamic_growth_steps, flushes=True)


_FORM = Form(
    "Keras's LossScaleOptimizer",
    loss_scale_optimizer,
    "dynamic_scale",
    "step_counter",
    {"initial_scale": "init_scale", "dynamic_growth_steps": "growth_interval"},
)


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of the optimizer's variables: by index, as `save_own_variables`, or by name.

    Takes the variables alone, under `vars`, or in the `optimizer` of a weights file. The settings are not among them;
    `initial_scale` and `dynamic_growth_steps`, as `get_config` has them, may be added.
    """
    for key in ("optimizer", "vars"):
        if isinstance(inner := mapping.get(key), Mapping):
            mapping = cast("Mapping[str, Any]", inner)
    named = {_INDICES.get(str(key), str(key)): value for key, value in mapping.items()}
    return _FORM.read({name: value for name, value in named.items() if not name.isdecimal()})


write = _FORM.write
VARIANTS = {"LossScaleOptimizer": loss_scale_optimizer}
