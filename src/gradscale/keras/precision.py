"""Keras's dtype policy, paired with the scaling policy and the optimizer that it needs."""

from dataclasses import dataclass, replace
from typing import Any

import keras

from gradscale.keras.checks import check_inner
from gradscale.keras.optimizer import LossScaleOptimizer
from gradscale.policies.contract import Policy
from gradscale.policies.static import NoScaling

__all__ = ["Precision", "current", "set"]


@dataclass(frozen=True, slots=True)
class Precision:
    """A dtype policy of Keras, and the scaling policy that it needs.

    Attributes:
        name: the dtype policy, as in `"mixed_float16"`.
        compute_dtype: what layers compute in.
        variable_dtype: what weights are stored in.
        policy: the scaling policy: `NoScaling()` unless layers compute in FP16, or weights are stored in it.
    """

    name: str
    compute_dtype: str
    variable_dtype: str
    policy: Policy | str

    @property
    def needs_scaling(self) -> bool:
        """Whether gradients pass through FP16, where small gradients vanish."""
        return "float16" in (self.compute_dtype, self.variable_dtype)

    def optimizer(self, inner_optimizer: Any) -> Any:
        """Returns the optimizer to compile a model with: wrapped where FP16 needs it, and otherwise unchanged.

        Args:
            inner_optimizer: an optimizer, or anything that `keras.optimizers.get` accepts, such as `"adam"`.

        Raises:
            ValueError: it scales the loss already.
        """
        optimizer = keras.optimizers.get(inner_optimizer)
        check_inner(optimizer)
        return LossScaleOptimizer(optimizer, policy=self.policy) if self.needs_scaling else optimizer


def set(name: Any, policy: Policy | str = "auto") -> Precision:
    """Sets Keras's dtype policy for all layers that are made afterwards, and returns it with its scaling policy.

        chosen = precision.set("mixed_float16")
        model = make_model()
        model.compile(optimizer=chosen.optimizer("adam"), loss="mse")

    The same lines train in `"mixed_bfloat16"` and `"float32"`, where the optimizer is returned unchanged.

    Args:
        name: a dtype policy of Keras, or its name.
        policy: the scaling policy for FP16; ignored for other dtypes.
    """
    keras.config.set_dtype_policy(name)
    return current(policy)


def current(policy: Policy | str = "auto") -> Precision:
    """Returns Keras's current dtype policy with its scaling policy.

    Args:
        policy: the scaling policy for FP16; ignored for other dtypes.
    """
    chosen: Any = keras.config.dtype_policy()
    found = Precision(chosen.name, chosen.compute_dtype, chosen.variable_dtype, policy)
    return found if found.needs_scaling else replace(found, policy=NoScaling())
