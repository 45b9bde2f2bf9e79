"""`LossScaleOptimizer`: Keras's class of that name with gradscale's rules, and with results for custom loops."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import keras
import numpy as np

from gradscale._text import scaler_text
from gradscale.engine.bf16 import note_bf16
from gradscale.engine.hints import OtherNames, explains_arguments
from gradscale.engine.metrics import host_metrics
from gradscale.engine.saved import check_state, policy_from_dict
from gradscale.keras.checks import (
    DYNAMIC_GROWTH_STEPS,
    INITIAL_SCALE,
    check_built,
    check_dynamic,
    check_inner,
    check_pairs,
    check_stateless,
    chosen_policy,
)
from gradscale.keras.compat import check_inner_settings, check_overwritten
from gradscale.keras.measure import BACKEND, Gradients, Losses, overwrites
from gradscale.keras.remember import StepResult, result_of, result_without_gradients, to_numpy
from gradscale.keras.step import is_narrow, run_step, unscaled
from gradscale.keras.variables import FIRST, SCALE_INDEX, StateLayout, fitted, on_host
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import multiplies
from gradscale.record import Array, numbers, settings_text, with_values

KerasLossScaleOptimizer: Any = keras.optimizers.LossScaleOptimizer


@keras.saving.register_keras_serializable(package="gradscale")
class LossScaleOptimizer(KerasLossScaleOptimizer, OtherNames):
    """Scales the loss for another optimizer, checks and unscales the gradients, and skips a step that overflowed.

    A drop-in for Keras's own class, with its arguments. Those give Keras's rule; `policy` gives any other.

    >>> optimizer = LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=1024.0)
    >>> optimizer.policy.growth_interval
    2000
    """

    _adapter: ClassVar[str] = "keras"

    recorder: Callable[[Gradients, Any], None] | None = None
    """What is called with the scaled gradients of a step and their scale. Set by `Watch`, for sampled steps only."""

    @explains_arguments("LossScaleOptimizer(inner_optimizer, policy={})")
    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float = INITIAL_SCALE,
        dynamic_growth_steps: int = DYNAMIC_GROWTH_STEPS,
        name: str | None = None,
        *,
        policy: Policy | str | None = None,
        **kwargs: Any,
    ) -> None:
        """Makes an optimizer before its first step.

        Args:
            inner_optimizer: the optimizer to run. Its clipping, weight decay, accumulation and averages see unscaled
                gradients.
            initial_scale: scale of the first step, for Keras's own rule.
            dynamic_growth_steps: clean steps in a row before the scale doubles, for Keras's own rule.
            name: name of the optimizer.
            policy: the rule for the scale, instead of Keras's own, or its name as on the command line, such as
                `"dynamic:growth_interval=100"`. `"auto"` is `Headroom()`, which follows the gradients of an FP16 run.
            **kwargs: what Keras's own class takes, to read old files.

        Raises:
            TypeError: `inner_optimizer` is not an optimizer, or `policy` is not a policy.
            ValueError: `inner_optimizer` scales the loss itself, `policy` was given with Keras's arguments, one of
                these is out of range, `dynamic=False` was given, or a setting of the inner optimizer, such as
                `clipnorm`.
        """
        check_inner(inner_optimizer)
        check_dynamic(kwargs.get("dynamic", True), initial_scale)
        check_inner_settings(kwargs)
        rule = chosen_policy(initial_scale, dynamic_growth_steps, policy)
        layout = StateLayout(rule.start())
        super().__init__(inner_optimizer, initial_scale, dynamic_growth_steps, name=name, **kwargs)
        self._policy = rule
        self._layout = layout
        self._has_own_rule = policy is not None
        self.losses = Losses()
        # Keras's attribute: the scale that training starts from.
        if self._has_own_rule:
            self.initial_scale = float(layout.start.scale)

    def __repr__(self) -> str:
        """Returns inner optimizer, policy, scale and counts as text. Never synchronizes."""
        places = [BACKEND.place(variable.value) for variable in self._state_variables] if self.built else []
        elsewhere = next(filter(None, places), None)
        state = self._layout.start if elsewhere else self.state
        about = [type(self.inner_optimizer).__name__, settings_text(self._policy)]
        return scaler_text("LossScaleOptimizer", about, state, None, lambda number: elsewhere or number.item())

    @property
    def policy(self) -> Policy:
        """The rule for the scale."""
        return self._policy

    @property
    def state(self) -> ScaleState:
        """The scale, its counters and what the policy remembers, as numpy scalars. Synchronizes with the device."""
        return self.read_state(on_host) if self.built else self._layout.start

    @property
    def trainable_variables(self) -> list[Any]:
        """The variables that the optimizer was built with."""
        return self._trainable_variables

    def metrics(self, result: StepResult | None = None) -> dict[str, float]:
        """Returns scale, counts, skip rate, gradient norm and headroom: Python numbers, NaN where one is not known.

        The optimizer keeps scale and counts only, as every further variable costs time on JAX. `grad_norm` and
        `headroom_bits`, how often the scale could double before the largest gradient overflows FP16, come from the
        result of a step. Synchronizes with the device.

        Args:
            result: that of the last step of a custom loop.
        """
        sizes = (None, None) if result is None else (result.grad_norm, result.amax)
        return host_metrics(self.state, *(None if size is None else to_numpy(size) for size in sizes))

    def scale_loss(self, loss: Any, optimizer_variables: Sequence[Any] | None = None) -> Any:
        """Returns `loss` times the scale, in float32 or wider. With a `policy` the next step knows if it was finite.

        Args:
            loss: the unscaled loss.
            optimizer_variables: values of the optimizer's variables where they are arguments of a pure function, as on
                JAX; by default the scale is read from the variable.

        Raises:
            ValueError: JAX would compile the scale in, as it is not among the arguments of the function.
        """
        # Not under Keras's own rule, which backs off as Keras's class does.
        if self._has_own_rule and self._policy.needs:
            self.losses.add(loss)
        if not (multiplies(self._policy) or is_narrow(loss)):
            return loss
        if optimizer_variables is not None:
            return keras.ops.multiply(loss, optimizer_variables[SCALE_INDEX])
        if not self.built:
            return keras.ops.multiply(loss, self._layout.start.scale)
        self._check_passed_in("scale_loss", "Call `scale_loss(loss, optimizer_variables)`.")
        return keras.ops.multiply(loss, self.dynamic_scale)

    def unscale_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Returns unscaled gradients, in float32 or wider, for inspection. `apply_if_finite` takes them scaled.

        Args:
            grads: scaled gradients of the variables that the optimizer was built with; None where there is none.
        """
        check_built("unscale_gradients", self.built)
        self._check_passed_in("unscale_gradients", "Call it on the gradients that the function returns.")
        check_pairs(grads, self._trainable_variables)
        return unscaled(grads, self._trainable_variables, 1.0 / self.dynamic_scale.value)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Updates the variables if all gradients are finite, and updates the scale. Keras calls this."""
        gradients = self._gradients(grads, trainable_variables)
        if gradients.grads:
            run_step(self, gradients, None, norm=False, kinds=False)

    @explains_arguments("apply_if_finite")
    def apply_if_finite(
        self,
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None = None,
        *,
        loss: Any = None,
        norm: bool = False,
    ) -> StepResult:
        """Updates the variables if all gradients are finite, updates the scale, and returns the result of the step.

        Does not synchronize with the device, except on torch.

        Args:
            grads: scaled gradients; None for a variable without one.
            trainable_variables: their variables; by default those that the optimizer was built with.
            loss: the unscaled loss; by default those that `scale_loss` has seen since the last step. One that is not
                finite skips the step and leaves the scale as it is: no scale could have helped.
            norm: measure the norm for the result.
        """
        gradients = self._gradients(grads, trainable_variables)
        present = gradients.present
        if not present:
            return result_without_gradients(self.dynamic_scale.value)
        step = run_step(self, gradients, loss, norm=norm, kinds=True)
        return result_of(step, [variable for _, variable in present], norm=norm)

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns the values of the model's and of the optimizer's variables after `apply`. Keras calls this on JAX."""
        # Past Keras's own class, which has its check and its rule here: the base class calls `apply`.
        return super(KerasLossScaleOptimizer, self).stateless_apply(optimizer_variables, grads, trainable_variables)

    def stateless_apply_if_finite(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
        *,
        loss: Any = None,
        norm: bool = False,
    ) -> tuple[list[Any], list[Any], StepResult]:
        """Returns the values of the model's and of the optimizer's variables after `apply_if_finite`, and its result.

        A pure function, for `jax.jit`. Not on TensorFlow.

        Args:
            optimizer_variables: values of the optimizer's variables.
            grads: scaled gradients; None for a variable without one.
            trainable_variables: values of the variables that the optimizer was built with.
            loss: the unscaled loss, as for `apply_if_finite`.
            norm: measure the norm for the result.

        Raises:
            ValueError: the optimizer is not built, or there are more or fewer values than variables.
        """
        check_stateless(self, optimizer_variables, trainable_variables)
        mine, models = self.variables, self._trainable_variables
        mapping = [*zip(models, trainable_variables, strict=True), *zip(mine, optimizer_variables, strict=True)]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            result = self.apply_if_finite(grads, loss=loss, norm=norm)
        return [scope.get_current_value(one) for one in models], [scope.get_current_value(one) for one in mine], result

    def build(self, var_list: Sequence[Any]) -> None:
        """Makes the variables of the scale, then those of the inner optimizer. Keras calls this."""
        present: Any = keras.config.dtype_policy()
        if present.compute_dtype == "bfloat16":
            note_bf16(
                self._policy,
                f"A LossScaleOptimizer was built under Keras's dtype policy {present.name!r}.",
                "Compile the model with the inner optimizer alone; `gradscale.keras.precision` chooses for you.",
            )
        # Before the inner optimizer's, in Keras's order: a checkpoint knows variables by index only.
        for variable in self._layout.variables:
            setattr(self, variable.name, variable.added_to(self))
        if not self.inner_optimizer.built:  # that of an adopted model keeps its state
            self.inner_optimizer.build(var_list)
        super(KerasLossScaleOptimizer, self).build(var_list)

    def exclude_from_weight_decay(
        self, var_list: Sequence[Any] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Excludes variables from the weight decay of the inner optimizer. Call it before the first step.

        Args:
            var_list: the variables to exclude.
            var_names: parts of the names of variables to exclude.
        """
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def load_state(self, state: ScaleState) -> None:
        """Continues from `state`, as `gradscale.import_state` returns it.

        Raises:
            TypeError: it is not a state of the policy.
            ValueError: it holds more than one scale.
        """
        check_state(self._policy, state)
        start = self._policy.start()
        self._layout = StateLayout(with_values(start, {name: getattr(state, name) for name in numbers(start)}))
        if self.built:
            self.write_state(self._layout.start, lambda leaves, dtype: np.array(leaves, dtype))

    def read_state(self, leaves: Callable[[Any, str], Sequence[Array]]) -> Any:
        """Returns the state in the variables, as `leaves` unpacks a value of a type."""
        return self._layout.state([variable.value for variable in self._state_variables], leaves)

    def write_state(self, state: ScaleState, vector: Callable[[Sequence[Array], str], Any]) -> None:
        """Assigns the variables a state, as `vector` packs leaves of a type."""
        # By an optimizer's `assign`, which Keras asks for instead of `variable.assign`: it is backend-specific.
        for variable, value in zip(self._state_variables, self._layout.values(state, vector), strict=True):
            self.inner_optimizer.assign(variable, value)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Loads saved variables: those of this class, or those of Keras's own. Keras calls this."""
        super().load_own_variables(self._layout.completed(store, len(self.variables)))
        # The file may hold a scale that this policy cannot have, such as Keras's infinity.
        if self.built:
            self.load_state(fitted(self.state, self._policy))

    def get_config(self) -> dict[str, Any]:
        """Returns what Keras's own class does, or name, inner optimizer and policy where one was given."""
        # Without a policy exactly Keras's keys, four of them from Keras 3.12 on, which its own class accepts too.
        config = super().get_config()
        if not self._has_own_rule:
            return config
        return {key: config[key] for key in ("name", "inner_optimizer")} | {"policy": self._policy.to_dict()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Returns the optimizer that `get_config` described, in its initial state."""
        policy = {"policy": policy_from_dict(config["policy"])} if isinstance(config.get("policy"), Mapping) else {}
        return super().from_config({**config, **policy}, custom_objects=custom_objects)

    def _gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> Gradients:
        """Returns gradients with their variables; builds the optimizer at the first call."""
        if trainable_variables is not None and not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(list(trainable_variables))
        check_built("apply", self.built)
        self._check_passed_in("apply", "Call `stateless_apply_if_finite(optimizer_variables, grads, ...)`.")
        variables = self._trainable_variables if trainable_variables is None else trainable_variables
        check_pairs(grads, variables)
        gradients = Gradients(list(grads), list(variables))
        check_overwritten([overwrites(variable) for _, variable in gradients.present])
        return gradients

    def _check_passed_in(self, what: str, instead: str) -> None:
        """Raises where a compiled function would keep the scale for good, or assign a variable that it cannot."""
        if BACKEND.is_constant(self.dynamic_scale.value):
            raise ValueError(
                "In a function that JAX compiles, the scale must be passed in with the optimizer's variables: one that "
                f"is read from the optimizer is compiled in, and never changes. Received: a call of `{what}`. {instead}"
            )

    @property
    def _state_variables(self) -> list[Any]:
        """The variables that hold the state of the scale."""
        return self._variables[FIRST : FIRST + len(self._layout.variables)]


def optimizer_of(model: Any, reader: str) -> LossScaleOptimizer:
    """Returns the optimizer of a compiled model.

    Raises:
        TypeError: it is none of gradscale's, and `reader`, a callback, needs one.
    """
    optimizer = model.optimizer
    if not isinstance(optimizer, LossScaleOptimizer):
        raise TypeError(
            f"`{reader}` reads a `gradscale.keras.LossScaleOptimizer`. "
            f"Received a model compiled with {type(optimizer).__module__}.{type(optimizer).__name__}. "
            "Compile the model with one; `gradscale.keras.adopt(model)` replaces Keras's own class."
        )
    return optimizer
