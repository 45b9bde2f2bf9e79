"""What the optimizer needs of a Keras backend, and the one that Keras runs on."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import keras

from gradscale.formats import FP32
from gradscale.policies.arithmetic import Namespace, smaller
from gradscale.policies.contract import Seen
from gradscale.record import Array

T = TypeVar("T")

Update = Callable[[Array], None]
"""Updates the variables with gradients divided by the scale it is given."""

Assign = Callable[[Any, Any], None]
"""Gives a variable a value."""

BACKENDS = ("tensorflow", "jax", "torch")


class Asked(NamedTuple):
    """What is to be found out about the gradients, beside whether they are finite.

    Attributes:
        amax: the largest magnitude.
        norm: their norm.
        edge: the share of elements above this magnitude; None if nobody wants it.
        kinds: whether each gradient holds a NaN or only infinities.
        scale: the scale that made them.
    """

    amax: bool = False
    norm: bool = False
    edge: float | None = None
    kinds: bool = False
    scale: Any = 1.0


class Measured(NamedTuple):
    """What was found in the gradients, still scaled, on all replicas together.

    All but `sizes` are leaves: numbers that a rule can calculate with on this backend.

    Attributes:
        sizes: one number per gradient; not finite where the gradient is not. NaN for a NaN if kinds were asked for.
        total: a number that is not finite, or not once it is unscaled, where that is so of a gradient to be unscaled.
        overwrites: not finite where a gradient is not that is no gradient but the next value of its variable.
        amax: largest magnitude in the gradients that are to be unscaled; anything if nobody asked.
        norm: norm of all gradients that are to be unscaled; 0 if nobody asked.
        share: share of the elements above an edge; 0 if nobody asked.
        loss_finite: whether the loss was finite.
    """

    sizes: Any
    total: Array
    overwrites: Array
    amax: Array
    norm: Array
    share: Array
    loss_finite: Array

    def seen(self, scale: Array, xp: Namespace) -> Seen:
        """Returns the facts that the decision is made from, in true units.

        Args:
            scale: the scale that made the gradients.
            xp: the namespace of the leaves.
        """
        unscale = 1.0 / scale
        finite = xp.logical_and(xp.isfinite(self.total * unscale), xp.isfinite(self.overwrites))
        return Seen(
            finite=finite,
            loss_finite=self.loss_finite,
            amax=xp.where(finite, smaller(self.amax * unscale, FP32.max, xp), FP32.max),
            norm=self.norm * unscale,
            upper_share=self.share,
        )


class Backend(Protocol):
    """The few things that Keras' backends do in ways of their own."""

    XP: Any
    """Namespace of the leaves."""

    def measure(self, grads: Sequence[Any], overwrites: Sequence[bool], loss: Any, asked: Asked) -> Measured:
        """Returns what all replicas together found in the gradients, of which there is at least one."""
        ...

    def divided(self, grads: Sequence[Any], scale: Array) -> list[Any]:
        """Returns gradients divided by a leaf, in float32 or wider."""
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

    def together(
        self,
        finish: Callable[[Measured | None, Update], T],
        measured: Measured | None,
        update: Callable[[Any, Any, Array], None],
        grads: Sequence[Any],
        variables: Sequence[Any],
    ) -> T:
        """Returns what `finish` makes of what was measured and of the update: once, for all replicas."""
        ...

    def is_constant(self, value: Any) -> bool:
        """Returns whether a variable's value would be compiled in here, so that the program never sees it change."""
        ...


def current() -> Backend:
    """Returns what belongs to the backend that Keras runs on.

    Raises:
        RuntimeError: Keras runs on a backend that cannot train.
    """
    name = keras.config.backend()
    if name not in BACKENDS:
        raise RuntimeError(
            f"Loss scaling needs a Keras backend that trains: {', '.join(BACKENDS)}. Received: {name!r}. "
            "Set KERAS_BACKEND before Keras is imported."
        )
    return cast(Backend, importlib.import_module(f"gradscale.keras.backends.{name}"))
