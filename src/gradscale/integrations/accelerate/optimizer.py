"""Whether a step of an optimizer that Accelerate has prepared was skipped, fused or not."""

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from gradscale.torch import StepResult


class ScaledOptimizer(AcceleratedOptimizer):
    """An `AcceleratedOptimizer` whose `step_was_skipped` is right for fused optimizers, too.

    Accelerate takes a step for skipped if the `step` of the optimizer was not called. That of a fused one is always
    called, and its kernel does nothing.
    """

    _noted: "bool | StepResult" = False

    @classmethod
    def take_over(cls, optimizer: AcceleratedOptimizer) -> None:
        """Makes a prepared optimizer one of this class, unless it is one already."""
        # `Accelerator.prepare_optimizer` builds the object, and keeps it in a list: it must stay the same one.
        if not isinstance(optimizer, cls):
            del optimizer._is_overflow  # False, as before any step; the property below takes its place
            optimizer.__class__ = cls

    @property
    def _is_overflow(self) -> bool:  # type: ignore[override]
        """Whether the last step was skipped. Synchronizes with the device if the optimizer is fused."""
        return self._noted if isinstance(self._noted, bool) else self._noted.skipped()

    @_is_overflow.setter
    def _is_overflow(self, step_not_called: bool) -> None:
        # Set by `step`, right after that of the scaler: its result is the one of this optimizer. Read when asked for,
        # so that a fused step does not synchronize. None if the scaler is disabled.
        result: Any = getattr(self.scaler, "last", None)
        self._noted = step_not_called if result is None else result

    def __getstate__(self) -> dict[str, Any]:
        """Returns the contents of a copy. The result of a step refers to the gradients of the original."""
        return super().__getstate__() | {"_noted": self._is_overflow}
