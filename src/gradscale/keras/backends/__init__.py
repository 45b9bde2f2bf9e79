"""What the optimizer needs of a Keras backend: kernels and control flow."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import keras

from gradscale.histogram.counts import ExponentHistogram
from gradscale.keras.compat import BACKENDS
from gradscale.record import Array

T = TypeVar("T")

Update = Callable[[Array], None]
"""Updates the variables with gradients multiplied by the factor it is given."""

Assign = Callable[[Any, Any], None]
"""Gives a variable a value."""


class Backend(ABC):
    """What differs between Keras's backends. As it is here: eagerly, with no replicas.

    Attributes:
        XP: namespace of the leaves, in which the rule is computed.
        ARRAYS: namespace of what `agree` returns: `where`, `isfinite` and `max`.
    """

    XP: Any
    ARRAYS: Any

    @abstractmethod
    def sizes(self, values: Sequence[Any], *, peaks: bool, kinds: bool) -> Any:
        """Returns a number for each array, not finite where one of its numbers is not, as a float32 vector.

        With `peaks` it is the largest magnitude, and with `kinds` NaN above inf; else any finite number will do.
        """

    @abstractmethod
    def norm(self, values: Sequence[Any]) -> Any:
        """Returns the norm of all arrays together, in float32."""

    @abstractmethod
    def share_above(self, values: Sequence[Any], edge: float) -> Any:
        """Returns the share of all numbers whose magnitude is above `edge`; inf and NaN are."""

    @abstractmethod
    def values(self, grad: Any) -> Any:
        """Returns the numbers of a gradient, dense or sparse."""

    @abstractmethod
    def counts(self, arrays: Sequence[Any]) -> list[tuple[ExponentHistogram, float]]:
        """Returns the histogram of each array, of which there is one at least, and its largest number. Synchronizes."""

    @abstractmethod
    def leaves(self, value: Any, dtype: str) -> list[Array]:
        """Returns the elements of a variable's value as leaves of a type."""

    @abstractmethod
    def vector(self, leaves: Sequence[Array], dtype: str) -> Any:
        """Returns leaves as a vector that a variable can be assigned."""

    @abstractmethod
    def place(self, value: Any) -> str:
        """Returns why a value cannot be read without synchronizing, as in `<on cuda:0>`; nothing where it can."""

    def agree(self, numbers: Any) -> Any:
        """Returns the largest of each number over all replicas, NaN above all, where the rule runs."""
        return numbers

    def multiplied(self, grads: Sequence[Any], factor: Array) -> list[Any]:
        """Returns gradients, dense or sparse, multiplied by a leaf, in float32 or wider."""
        return [keras.ops.multiply(grad, factor) for grad in grads]

    def no_grad(self) -> AbstractContextManager[Any]:
        """Returns a context in which nothing is kept for a backward pass."""
        return nullcontext()

    def gate(self, applied: Array, update: Callable[[], None], variables: Sequence[Any], assign: Assign) -> None:
        """Runs `update`, which changes `variables`, if `applied` holds."""
        del variables, assign
        if applied:
            update()

    def merge_call(
        self,
        finish: Callable[[Any, Update], T],
        numbers: Any,
        update: Callable[[Any, Any, Array], None],
        grads: Sequence[Any],
        variables: Sequence[Any],
    ) -> T:
        """Returns `finish(numbers, update)`, which is run once for all replicas; `update` is run on each."""
        return finish(numbers, lambda factor: update(grads, variables, factor))

    def owner(self, value: Any) -> Any:
        """Returns what compiles the function that a tensor is part of; None for a tensor that has a value."""
        del value

    def is_constant(self, value: Any) -> bool:
        """Returns whether a variable's value would be a constant of the function that is being compiled."""
        del value
        return False


def current() -> Backend:
    """Returns the backend that Keras uses.

    Raises:
        RuntimeError: Keras uses a backend that cannot train.
    """
    name = keras.config.backend()
    if name not in BACKENDS:
        raise RuntimeError(
            f"Loss scaling needs a Keras backend that trains: {', '.join(BACKENDS)}. Received: {name!r}. "
            "Set KERAS_BACKEND before Keras is imported."
        )
    return importlib.import_module(f"gradscale.keras.backends.{name}").BACKEND
