"""What the optimizer needs of a Keras backend: kernels and control flow."""

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import keras

from gradscale.engine.measurement import Measurement
from gradscale.engine.plan import Plan
from gradscale.formats import FloatArray
from gradscale.policies.arithmetic import Namespace
from gradscale.policies.contract import Seen
from gradscale.record import Array

T = TypeVar("T")

Update = Callable[[Array], None]
"""Updates the variables with gradients multiplied by the factor it is given."""

Assign = Callable[[Any, Any], None]
"""Gives a variable a value."""

BACKENDS = ("tensorflow", "jax", "torch")


@dataclass(frozen=True, slots=True)
class StepPlan(Plan):
    """What a step reads of the gradients, with what only Keras knows.

    Attributes:
        kinds: whether each gradient holds a NaN or only infinities.
        scale: the scale that made the gradients.
        overwrites: positions of gradients that are the next value of their variable, as with the scales of FP8 layers.
            They do not depend on the scale of the loss.
        half: positions of gradients whose variables are stored in FP16, which the inner optimizer casts them to.
    """

    kinds: bool = False
    scale: Any = 1.0
    overwrites: tuple[int, ...] = ()
    half: tuple[int, ...] = ()

    def to_unscale(self, values: Sequence[T]) -> list[T]:
        """Returns the values of the gradients that the step unscales."""
        return [value for position, value in enumerate(values) if position not in self.overwrites]


class Observation(NamedTuple):
    """What was measured before the decision, in arrays of the backend's `XP`.

    Attributes:
        measurement: what was found in the gradients that the step unscales. Its `sizes` are of all gradients, and a
            tensor of the backend.
        loss_finite: whether the loss was finite.
        overwrites: not finite where a gradient that overwrites its variable is not; None where there is none.
    """

    measurement: Measurement
    loss_finite: Array
    overwrites: Array | None

    def seen(self, scale: Array, xp: Namespace) -> Seen:
        """Returns the facts that the decision is made from, unscaled."""
        overflowed = None if self.overwrites is None else xp.logical_not(xp.isfinite(self.overwrites))
        return self.measurement.seen(scale, self.loss_finite, xp, overflowed)


class Counts(NamedTuple):
    """What was counted of arrays, in rows, in host memory.

    Attributes:
        bins: elements in each bin of `gradscale.histogram.EXPONENTS`.
        outside: elements that are zero, inf and NaN.
        amax: the largest magnitude; NaN where there is one.
    """

    bins: FloatArray
    outside: FloatArray
    amax: FloatArray


class Backend(Protocol):
    """What differs between Keras's backends."""

    XP: Any
    """Namespace of the leaves."""

    def measure(self, grads: Sequence[Any], loss_finite: Any, plan: StepPlan) -> Observation:
        """Returns what this replica finds in its gradients, of which there is at least one.

        `loss_finite` is whether its loss was finite; None if that is not known.
        """
        ...

    def agree(self, observation: Observation) -> Observation:
        """Returns the observation of all replicas together."""
        ...

    def multiplied(self, grads: Sequence[Any], factor: Array) -> list[Any]:
        """Returns gradients multiplied by a leaf, in float32 or wider."""
        ...

    def values(self, grad: Any) -> Any:
        """Returns the numbers of a gradient, dense or sparse."""
        ...

    def counts(self, arrays: Sequence[Any]) -> Counts:
        """Returns arrays, of which there is at least one, by the powers of two of their numbers. Synchronizes."""
        ...

    def no_grad(self) -> AbstractContextManager[Any]:
        """Returns a context in which nothing is kept for a backward pass."""
        ...

    def leaves(self, value: Any, dtype: str) -> list[Array]:
        """Returns the elements of a variable's value as leaves of a type."""
        ...

    def vector(self, leaves: Sequence[Array], dtype: str) -> Any:
        """Returns leaves as a vector that a variable can be assigned."""
        ...

    def gate(self, applied: Array, update: Callable[[], None], variables: Sequence[Any], assign: Assign) -> None:
        """Runs `update`, which changes `variables`, if `applied` holds."""
        ...

    def merge_call(
        self,
        finish: Callable[[Observation | None, Update], T],
        observation: Observation | None,
        update: Callable[[Any, Any, Array], None],
        grads: Sequence[Any],
        variables: Sequence[Any],
    ) -> T:
        """Returns `finish(observation, update)`, which is run once for all replicas; `update` is run on each."""
        ...

    def place(self, value: Any) -> str:
        """Returns why a value cannot be read without synchronizing, as in `<on cuda:0>`; nothing where it can."""
        ...

    def owner(self, value: Any) -> Any:
        """Returns what compiles the function that a tensor is part of; None for a tensor that has a value."""
        ...

    def is_constant(self, value: Any) -> bool:
        """Returns whether a variable's value would be a constant of the function that is being compiled."""
        ...


def current() -> Backend:
    """Returns the module of the backend that Keras uses.

    Raises:
        RuntimeError: Keras uses a backend that cannot train.
    """
    name = keras.config.backend()
    if name not in BACKENDS:
        raise RuntimeError(
            f"Loss scaling needs a Keras backend that trains: {', '.join(BACKENDS)}. Received: {name!r}. "
            "Set KERAS_BACKEND before Keras is imported."
        )
    return cast(Backend, importlib.import_module(f"gradscale.keras.backends.{name}"))


def only_observation(observation: Observation) -> Observation:
    """Returns the observation: `agree` where there are no replicas."""
    return observation


def single_call(
    finish: Callable[[Observation | None, Update], T],
    observation: Observation | None,
    update: Callable[[Any, Any, Array], None],
    grads: Sequence[Any],
    variables: Sequence[Any],
) -> T:
    """Returns `finish(observation, update)`: `merge_call` where there are no replicas."""
    return finish(observation, lambda factor: update(grads, variables, factor))
