"""Random programs, beside the inner optimizer alone, which gets the unscaled gradients of the steps that are finite.

The scale is compared with that of `gradscale.numpy`, on the same scaled gradients.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.backend.helpers import BACKEND, compiled, numbers, same, tensors
from tests.keras.backend.programs import Program, Step, random_program

from gradscale import NoScaling
from gradscale.keras import LossScaleOptimizer
from gradscale.numpy import LossScaler

FEW = {"tensorflow": 50, "jax": 20, "torch": 50}[BACKEND]
MANY = {"tensorflow": 100, "jax": 50, "torch": 600}[BACKEND]
"""Programs of the ordinary and of the long run. JAX compiles each step of a custom loop."""

EPSILONS = {"float64": 2.0**-23, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Relative error of one rounding. Keras keeps the hyperparameters of float64 variables in float32."""

ROUNDINGS = 64
"""Roundings by which two runs may differ: compiled code rounds fewer times than Keras's operations one by one."""


class Pair:
    """A scaled run, and the plain one that it must equal.

    Attributes:
        program: the program of both.
        optimizer: the optimizer under test.
        models: its variables.
        scaler: what the scale is compared with.
        plain: the inner optimizer alone.
        plain_models: its variables.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.models, self.plain_models = program.variables(), program.variables()
        self.plain = program.inner()
        self.plain.build(self.plain_models)
        self.optimizer = self._new_optimizer()
        self.scaler = LossScaler(self.optimizer.policy, max_consecutive_skips=10**6)
        self._compiled: Callable[..., Any] | None = None

    def run(self, step: Step) -> None:
        """Runs a step in both, and compares them."""
        if step.reload:
            self._reload()
        if step.learning_rate and not callable(self.program.settings["learning_rate"]):
            self.optimizer.learning_rate = self.plain.learning_rate = step.learning_rate
        scaled = self._scaled(step)
        before = self._values()
        expected = self.scaler.step([grad for grad in scaled if grad is not None], loss=np.float32(step.loss))
        result = self._apply(scaled, step.loss)
        if expected.applied:
            self._apply_plain(scaled, expected.scale)
            self._compare()
        else:
            assert same(before, self._values()), "a skipped step changed a variable"
        if result is not None:
            assert numbers(result.applied, result.scale, result.next_scale) == [
                expected.applied,
                expected.scale,
                expected.next_scale,
            ]
            assert result.status() == expected.status()
        assert self.optimizer.state == self.scaler.state

    def finish(self) -> None:
        """Ends both runs, which overwrites variables by their averages, and compares them."""
        self.optimizer.finalize_variable_values(self.models)
        self.plain.finalize_variable_values(self.plain_models)
        self._compare()

    def _new_optimizer(self) -> LossScaleOptimizer:
        rule: dict[str, Any] = (
            {"policy": self.program.policy} if self.program.policy else {"initial_scale": self.program.initial_scale}
        )
        optimizer = LossScaleOptimizer(self.program.inner(), **rule)
        optimizer.build(self.models)
        return optimizer

    def _reload(self) -> None:
        """Saves the optimizer, and continues with a new one that has loaded it."""
        store: dict[str, Any] = {}
        self.optimizer.save_own_variables(store)
        config = keras.saving.serialize_keras_object(self.optimizer)
        self.optimizer = keras.saving.deserialize_keras_object(config)
        self.optimizer.build(self.models)
        self.optimizer.load_own_variables({key: np.array(value) for key, value in store.items()})
        self._compiled = None

    def _scaled(self, step: Step) -> list[Any]:
        """Returns the gradients as a backward pass of the scaled loss makes them, with the step's fault in one."""
        with np.errstate(over="ignore"):
            scaled = [
                None if grad is None else np.asarray(grad * self.scaler.loss_scale).astype(self.program.grad_dtype)
                for grad in step.grads
            ]
        if isinstance(self.program.policy, NoScaling) or step.fault is None:
            return scaled
        there = [grad for grad in scaled if grad is not None]
        chosen = there[step.place % len(there)]
        chosen[(0,) * chosen.ndim] = step.fault
        return scaled

    def _apply(self, scaled: Sequence[Any], loss: float) -> Any:
        grads, way = tensors(*scaled, dtype=self.program.grad_dtype), self.program.way
        if way == "compiled":
            self._compiled = self._compiled or compiled(self.optimizer, self.models)
            return self._compiled(*grads)
        if way == "apply_if_finite":
            return self.optimizer.apply_if_finite(grads, self.models, loss=tensors(loss)[0])
        if way == "apply_gradients":
            self.optimizer.apply_gradients(list(zip(grads, self.models, strict=True)))
            return None
        return self.optimizer.apply(grads, self.models)

    def _apply_plain(self, scaled: Sequence[Any], scale: float) -> None:
        unscaled = [None if grad is None else grad.astype("float32") / np.float32(scale) for grad in scaled]
        grads = zip(tensors(*unscaled), self.plain_models, strict=True)
        cast = [grad if grad is None else keras.ops.cast(grad, model.dtype) for grad, model in grads]
        self.plain.apply(cast, self.plain_models)

    def _values(self) -> list[Any]:
        return [_host(variable) for variable in (*self.models, *self.optimizer.inner_optimizer.variables)]

    def _compare(self) -> None:
        plain = [_host(variable) for variable in (*self.plain_models, *self.plain.variables)]
        if self.program.exact:
            assert same(self._values(), plain)
            return
        error = ROUNDINGS * EPSILONS[self.program.dtype]
        for ours, theirs in zip(self._values(), plain, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=error, atol=error)


def _host(variable: Any) -> Any:
    """Returns the value of a variable; in float32 where numpy does not have its type."""
    is_narrow = keras.backend.standardize_dtype(variable.dtype) == "bfloat16"
    value = keras.ops.cast(variable.value, "float32") if is_narrow else keras.ops.copy(variable.value)
    return keras.ops.convert_to_numpy(value)


def run_program(seed: int) -> None:
    """Runs the program of a seed beside its plain form; raises where they differ."""
    program = random_program(seed)
    try:
        with warnings.catch_warnings():
            # A variable without a gradient is part of some programs.
            warnings.filterwarnings("ignore", "Gradients do not exist for variables", UserWarning)
            pair = Pair(program)
            for step in program.steps:
                pair.run(step)
            pair.finish()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {program}") from error


@pytest.mark.parametrize("seed", range(FEW))
def test_a_program_equals_the_inner_optimizer_alone_on_its_finite_steps(seed: int) -> None:
    run_program(seed)


@pytest.mark.slow
def test_many_programs_equal_the_inner_optimizer_alone() -> None:
    for seed in range(1000, 1000 + MANY):
        run_program(seed)
