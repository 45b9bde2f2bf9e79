"""The result of a step: the same fields, methods and meanings on every adapter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from gradscale._text import number_text
from gradscale.engine.culprits import Culprit, culprits_of
from gradscale.engine.hints import OF_RESULT, OtherNames

F = TypeVar("F", bound=Callable[..., Any])


if TYPE_CHECKING:

    def to_be_called(method: F) -> F:
        """Returns `method`, of which a type checker knows that its bare name is always true."""
        return method

else:

    class to_be_called:  # a decorator
        """A method as before, but its bare name, as in `if result.skipped:`, has no truth value and equals no flag."""

        def __init__(self, method: Callable[..., Any]) -> None:
            update_wrapper(self, method)

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            # Of the class, the plain function: documentation, signatures and pickles find what they know.
            return self.__wrapped__ if instance is None else Uncalled(self.__wrapped__, instance)


class Uncalled(partial[Any]):
    """A method of an object, not called yet."""

    def __bool__(self) -> NoReturn:
        self._refuse("has no truth value")

    def __eq__(self, other: object) -> bool:
        # Only with what such methods return: code that compares functions works as with others.
        if isinstance(other, bool | str | list):
            self._refuse(f"is never equal to {other!r}")
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def _refuse(self, why: str) -> NoReturn:
        name = self.func.__name__
        raise TypeError(f"`{name}` is a method, which {why}. Call it: `result.{name}()`.")


class ScaleDesync(RuntimeError):
    """Raised when devices or ranks that share a scale have different ones.

    Gradients that different scales made must not be added: no factor unscales their sum.
    """


class Status(StrEnum):
    """The status of a step: applied, or why it was skipped."""

    APPLIED = "applied"
    OVERFLOW = "overflow"
    NONFINITE_LOSS = "nonfinite_loss"
    NO_GRADS = "no_grads"

    @classmethod
    def of(cls, applied: Any, loss_finite: Any) -> "Status":
        """Returns the status of a step that had gradients. A loss that is not finite takes precedence."""
        if applied:
            return cls.APPLIED
        return cls.OVERFLOW if loss_finite else cls.NONFINITE_LOSS


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class StepResult(OtherNames):
    """The result of one step.

    The attributes are arrays of the framework, on the device of the scale; reading them does not synchronize.
    `skipped`, `status` and `culprits` return plain values, and synchronize with the device where there is one. They are
    methods: without the call, as in `if result.skipped:`, they raise.

    Attributes:
        applied: whether the update was applied.
        scale: the scale that made the gradients.
        next_scale: the scale of the next step.
        loss_finite: whether every loss was finite, on this device and all others that share the scale.
        grad_norm: norm of all gradients, unscaled and before clipping; inf after an overflow; None unless `clip_norm`
            or `norm=True` was given.
        amax: largest magnitude of any gradient, unscaled; inf after an overflow; None where it was not read.
        retries: how often the backward pass was run again.
        attempted: whether there were gradients at all, on this device or another that shares the scale.
        sizes: one number per gradient, inf or NaN where it holds one; None where nothing was checked.
        counts: elements of each gradient that are not finite; empty where they were not counted.
        names: what the gradients are called, in the order of `sizes`.
    """

    applied: Any
    scale: Any
    next_scale: Any
    loss_finite: Any = True
    grad_norm: Any = None
    amax: Any = None
    retries: Any = 0
    attempted: bool = True
    sizes: Any = None
    counts: Sequence[int] = ()
    names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Returns status, scales, norm and retries as text. Never synchronizes: what is on a device is not read."""
        numbers = {"scale": self.scale, "next_scale": self.next_scale, "grad_norm": self.grad_norm}
        known = [f"{name}={number_text(self._shown(value))}" for name, value in numbers.items() if value is not None]
        retried = [f"retries={retries}"] if (retries := self._shown(self.retries)) != 0 else []
        return f"{type(self).__name__}({', '.join([f'status={self.status_text()}', *known, *retried])})"

    def __bool__(self) -> bool:
        raise TypeError(
            "A StepResult is neither true nor false. Use `result.skipped()`, which may synchronize, or "
            "`result.applied`, a flag on the device, which does not. For whether there is a result, use "
            "`result is not None`."
        )

    @classmethod
    def _answer(cls, name: str) -> str | None:
        return OF_RESULT.get(name)

    def status_text(self) -> str:
        """Returns the status as text, or where it is if it is not in host memory. Never synchronizes."""
        if not self.attempted:
            return Status.NO_GRADS.value
        applied, loss_finite = self._shown_applied(), self._shown(self.loss_finite)
        if isinstance(applied, str):
            return applied
        return "skipped" if not applied and isinstance(loss_finite, str) else Status.of(applied, loss_finite).value

    def _shown_applied(self) -> Any:
        return self._shown(self.applied)

    @staticmethod
    def _shown(value: Any) -> Any:
        """Returns a number as it is shown: a Python number, or the text `<...>` for one that is not in host memory."""
        return value.item() if hasattr(value, "item") else value

    @to_be_called
    def skipped(self) -> bool:
        """Returns whether weights and optimizer state were left as they were. Synchronizes with the device."""
        return not bool(self.applied)

    @to_be_called
    def status(self) -> Status:
        """Returns the status of the step. Synchronizes with the device."""
        if not self.attempted:
            return Status.NO_GRADS
        return Status.of(not self.skipped(), bool(self.loss_finite))

    @to_be_called
    def culprits(self) -> list[Culprit]:
        """Returns the parameters whose gradients were not finite, in their order. Synchronizes with the device.

        Does not read the gradients again: the sizes were kept from the step.
        """
        sizes: list[float] = [] if self.sizes is None else np.asarray(self.sizes).tolist()
        return culprits_of(self.names, sizes, self.counts)

    @property
    def parameters(self) -> int:
        """How many gradients the result has names for."""
        return len(self.names)
