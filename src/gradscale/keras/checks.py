"""What the optimizer refuses: lists that do not fit each other, and calls that come too early."""

from collections.abc import Sequence
from typing import Any

import keras


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


def check_dynamic(dynamic: bool) -> None:
    """Raises for tf-keras' way to ask for a fixed scale."""
    if not dynamic:
        raise ValueError(
            "A scale that never moves is a policy. Received: dynamic=False. "
            "Pass `policy=Static(1024.0)`, or do without this class and set `loss_scale_factor` on the inner optimizer."
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


def check_travels(what: str, instead: str, is_constant: bool) -> None:
    """Raises where a compiled function would keep the scale of today for ever, or write to a variable it cannot."""
    if is_constant:
        raise ValueError(
            "In a function that JAX compiles the scale must travel with the optimizer's variables: one that is read "
            f"from the optimizer is compiled in, and never moves. Received: a call of `{what}`. {instead}"
        )


def check_stateless(optimizer: Any, optimizer_variables: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
    """Raises unless values are given for all variables, on a backend with pure functions."""
    if keras.config.backend() == "tensorflow":
        raise ValueError(
            "TensorFlow's variables are changed in place, so that a step is no pure function there. "
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
