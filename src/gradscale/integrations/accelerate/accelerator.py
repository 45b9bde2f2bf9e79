"""What an `Accelerator` does differently once a scaler of gradscale is installed."""

import logging
import math
from pathlib import Path
from types import NoneType
from typing import Any

from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.constants import SCALER_NAME
from torch import Tensor
from torch.optim import Optimizer

from gradscale.recording.loggers import logged
from gradscale.torch import GradScaler, StepResult

logger = logging.getLogger(__name__)

SPREAD = frozenset({DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA})
"""Where gradients are clipped in ways of their own."""


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


class ScaledAccelerator(Accelerator):
    """The methods that `install` puts before those of an accelerator's own class.

    Attributes:
        scaler: the scaler.
    """

    scaler: GradScaler
    _retries: int = 0
    _logs: bool = True
    _grad_norm: Tensor | None = None

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Scales the loss and runs its backward pass, as `GradScaler.backward` does, whose `retries` it takes as well.

        By default those of `install`. The loss is first divided by the number of micro-batches.
        """
        if not isinstance(self.scaler, GradScaler):
            super().backward(loss, **kwargs)  # another scaler or none was set, as some do to switch scaling off
            return
        # Accelerate calls `scale(loss).backward()`, which cannot be run again if it overflows.
        self.scaler.backward(loss / self.gradient_accumulation_steps, **({"retries": self._retries} | kwargs))

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Returns the prepared optimizer, which reports skipped steps though it be fused."""
        prepared: Any = super().prepare_optimizer(optimizer, device_placement)
        ScaledOptimizer.take_over(prepared)
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        """Releases prepared objects, and forgets a step that was begun and is never made.

        Transformers calls it before it trains again with a smaller batch, where `auto_find_batch_size` is set.
        """
        if isinstance(self.scaler, GradScaler):
            self.scaler._discard()
        return super().free_memory(*objects)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: Any = 2) -> Any:
        """Unscales and clips, and returns the norm of the unscaled gradients, which is kept for `log`."""
        parameters = list(parameters)
        if norm_type == 2 and (optimizer := self._clips_by(parameters, max_norm)) is not None:
            # By one factor, where Accelerate unscales first, then reads the norm, then multiplies again.
            norm: Any = self.scaler.unscale_and_clip_(optimizer, max_norm)
        else:
            norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        # Not a DTensor, whose value takes all ranks: `log` may be called by one.
        self._grad_norm = norm.detach() if type(norm) is Tensor else None
        return norm

    def _clips_by(self, parameters: list[Tensor], max_norm: float) -> Optimizer | None:
        """Returns the only optimizer, if its gradients are those of `parameters`, plain ones, and the scaler's."""
        if self.distributed_type in SPREAD or not self.native_amp or self.mixed_precision != "fp16":
            return None
        if len(self._optimizers) != 1 or not 0 < max_norm < math.inf:
            return None
        optimizer = self._optimizers[0]
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        asked = [id(each) for each in parameters if each.grad is not None]
        held = [id(each) for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        plain = {type(each.grad) for each in parameters} <= {Tensor, NoneType}
        return optimizer if plain and set(asked) == set(held) else None

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Loads what `save_state` has saved; where it has no scaler, as of a run in BF16, the scaler stays as it is."""
        try:
            super().load_state(*args, **kwargs)
        except FileNotFoundError as error:
            if Path(error.filename or "").name != SCALER_NAME:
                raise
            logger.warning(
                "There is no %s in the checkpoint: all else is loaded, and the scaler is as it was.", SCALER_NAME
            )
            scaler, self.scaler = self.scaler, None  # type: ignore[assignment]
            try:
                super().load_state(*args, **kwargs)
            finally:
                self.scaler = scaler

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Logs `values` and the metrics of the scaler to all trackers."""
        super().log(values | self.scaler_metrics(), *args, **kwargs)

    def scaler_metrics(self) -> dict[str, float]:
        """Returns the metrics of the scaler under the names of loggers, and the norm that was clipped last.

        None before the first step, nor with `install(..., log=False)`. Synchronizes with the device for the norm;
        without clipping there is none, and it does not.
        """
        if not self._logs:
            return {}
        norm = math.nan if self._grad_norm is None else float(self._grad_norm)
        # A disabled scaler counts nothing.
        stepped = isinstance(self.scaler, GradScaler) and self.scaler.is_enabled() and self.scaler.last is not None
        return logged((self.scaler.metrics() if stepped else {}) | {"grad_norm": norm})
