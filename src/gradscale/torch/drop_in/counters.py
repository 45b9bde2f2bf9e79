"""The steps of `GradScaler` that were applied and skipped, counted by `update` without synchronizing."""

from typing import Any

import torch
from torch import Tensor

from gradscale.torch.step.host_copy import host_value


class Counters:
    """Counts steps: in host memory if the scale is on the CPU, else on the device of the scale.

    A step is one `update`, and is skipped if a gradient of any of its optimizers was not finite.

    Attributes:
        scale: the scale of the next step.
        skipped: steps skipped so far.
    """

    # On a device two small kernels a step; the rest is computed when it is asked for, every few steps.

    __slots__ = (
        "_at_floor",
        "_floor",
        "_last_applied",
        "_made_with",
        "_overflow",
        "_previous",
        "_steps",
        "scale",
        "skipped",
    )

    def __init__(self, scale: float, applied: int = 0, skipped: int = 0, consecutive_skips: int = 0) -> None:
        self.scale: Any = scale
        self.skipped: Any = skipped
        self._steps = applied + skipped
        self._last_applied: Any = self._steps - consecutive_skips
        self._overflow: Any = False
        self._made_with: Any = scale
        self._floor = 0.0
        self._at_floor: Any = False
        self._previous: tuple[Any, Any, Any] = (self._steps, self.skipped, self._last_applied)

    @property
    def applied(self) -> Any:
        """Steps applied so far."""
        return self._steps - self.skipped

    @property
    def consecutive_skips(self) -> Any:
        """Steps skipped since the last applied one."""
        return self._steps - self._last_applied

    @property
    def stuck(self) -> Any:
        """Whether the last step overflowed, and no lower scale is expected to help."""
        return self._overflow & (self._at_floor | (self._made_with <= self._floor))

    def on_host(self) -> "Counters":
        """Returns a copy in host memory. Synchronizes with the device."""
        return Counters(float(self.scale), int(self.applied), int(self.skipped), int(self.consecutive_skips))

    def count(self, found_inf: Tensor, scale: Tensor, made_with: Tensor, floor: float, at_floor: Any = False) -> None:
        """Counts a step. Does not synchronize with the device.

        Args:
            found_inf: 0 unless it was skipped.
            scale: the scale of the next step, a copy: it is kept.
            made_with: the scale that made its gradients.
            floor: scale from which on no lower one is expected to help.
            at_floor: whether the policy says so, a leaf of its state.
        """
        self._previous = (self._steps, self.skipped, self._last_applied)
        self._steps += 1
        self._floor, self._at_floor = floor, at_floor
        known = host_value(found_inf)
        if known is None:
            overflow = found_inf != 0
            self.skipped = self.skipped + overflow
            self._last_applied = torch.where(overflow, self._last_applied, self._steps)
            self.scale, self._made_with, self._overflow = scale, made_with, overflow
        else:
            self.skipped += bool(known)
            self._last_applied = self._last_applied if known else self._steps
            self.scale, self._made_with, self._overflow = host_value(scale), host_value(made_with), bool(known)

    def uncount(self) -> None:
        """Takes the last step back, which `count` then counts again: once more optimizers have been stepped for it."""
        self._steps, self.skipped, self._last_applied = self._previous
