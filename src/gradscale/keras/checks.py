"""The arguments of the optimizer: the policy that they give, and what is refused."""

from collections.abc import Sequence
from typing import Any

import keras

from gradscale._text import short
from gradscale.peers.specs import as_policy
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE, check_count, check_scale
from gradscale.policies.contract import Policy
from gradscale.policies.dynamic import Dynamic

INITIAL_SCALE = 2.0**15
DYNAMIC_GROWTH_STEPS = 2000
"""Keras's own defaults."""


def chosen_policy(initial_scale: float, dynamic_growth_steps: int, policy: Policy | str | None) -> Policy:
    """Returns the rule: `policy`, or Keras's own where there is none, which doubles and halves.

    Keras's scale can reach infinity or zero, and then never changes. Here it stays between 2**-126 and 2**126.

    Raises:
        TypeError: `policy` is not a policy, or one of Keras's arguments is not a number.
        ValueError: both were given, or one of Keras's arguments is out of range.
    """
    if policy is None:
        check_scale("initial_scale", initial_scale)
        check_count("dynamic_growth_steps", dynamic_growth_steps)
        return Dynamic(
            init_scale=initial_scale,
            growth_interval=dynamic_growth_steps,
            min_scale=LOWEST_SCALE,
            max_scale=HIGHEST_SCALE,
        )
    # Compared with the defaults: a caller who passes exactly these with a policy loses nothing.
    if (initial_scale, dynamic_growth_steps) != (INITIAL_SCALE, DYNAMIC_GROWTH_STEPS):
        raise ValueError(
            "`policy` replaces `initial_scale` and `dynamic_growth_steps`. Received all at once: "
            f"initial_scale={initial_scale!r}, dynamic_growth_steps={dynamic_growth_steps!r}, policy={policy!r}. "
            "Give them to the policy: `Dynamic(init_scale=..., growth_interval=...)`."
        )
    return as_policy(policy)


def check_inner(inner_optimizer: Any) -> None:
    """Raises unless there is an optimizer to run, and one that does not divide the gradients a second time."""
    if not isinstance(inner_optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "`inner_optimizer` must be a Keras optimizer. "
            f"Received: {inner_optimizer!r} ({type(inner_optimizer).__name__}). "
            "Pass an instance, such as `keras.optimizers.Adam()`."
        )
    if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`inner_optimizer` must be one that does not scale the loss, as it would divide the gradients again. "
            f"Received: a {type(inner_optimizer).__name__}. Pass the optimizer inside of it, its `inner_optimizer`."
        )


def check_dynamic(dynamic: bool, initial_scale: Any) -> None:
    """Raises for tf-keras's way to ask for a fixed scale, by name or as the second argument."""
    if isinstance(initial_scale, bool):
        raise TypeError(
            "The second argument of Keras's class is `initial_scale`; that of tf-keras, `dynamic`, is gone. "
            f"Received: {initial_scale}. Leave it out, and give others by name; for a scale that never changes use "
            "`policy=Static(1024.0)`."
        )
    if not dynamic:
        raise ValueError(
            "A scale that never changes is a policy. Received: dynamic=False. "
            f"Pass `policy=Static({short(initial_scale)})`, or set `loss_scale_factor` directly on the "
            "`inner_optimizer` and use that alone."
        )


def check_pairs(grads: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raises unless there is a gradient, or None, for every variable."""
    if len(grads) != len(variables):
        raise ValueError(
            "There must be one gradient for each variable, None where there is none. "
            f"Received: {len(grads)} gradients for {len(variables)} variables."
        )


def check_built(what: str, built: bool) -> None:
    """Raises unless the optimizer has its variables."""
    if not built:
        raise ValueError(
            f"`{what}` needs an optimizer that knows its variables. Received: one that is not built. "
            "Call `optimizer.build(model.trainable_variables)` first."
        )


def check_stateless(optimizer: Any, optimizer_variables: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
    """Raises unless values are given for all variables, on a backend with pure functions."""
    if keras.config.backend() == "tensorflow":
        raise ValueError(
            "TensorFlow's variables are updated in place, so a step is not a pure function there. "
            "Received: a call of `stateless_apply_if_finite`. Use `apply_if_finite`."
        )
    check_built("stateless_apply_if_finite", optimizer.built)
    for name, values, variables in (
        ("optimizer_variables", optimizer_variables, optimizer.variables),
        ("trainable_variables", trainable_variables, optimizer.trainable_variables),
    ):
        if len(values) != len(variables):
            raise ValueError(
                f"`{name}` must hold one value for each variable. "
                f"Received: {len(values)} values for {len(variables)} variables."
            )
