"""The numbers that rules compute with: numpy scalars in host memory, or 0-d tensors on a device."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gradscale.engine.measurement import Measurement
from gradscale.policies.contract import Seen
from gradscale.policies.scalars import EXACT, SCALARS
from gradscale.torch.step import host_copy
from gradscale.torch.step.host_copy import read_now

T = TypeVar("T")


def unwarned(function: Callable[..., T], *args: Any, safe: bool) -> T:
    """Returns what `function` returns. numpy does not warn or raise: inf and NaN are facts here, as on a device.

    `safe` is whether nothing can overflow or be divided by 0.
    """
    # To switch numpy's warnings off takes as long as half of a rule.
    if safe:
        try:
            return function(*args)
        except FloatingPointError:
            pass  # an underflow, for which numpy raises where the user has set it to
    with np.errstate(all="ignore"):
        return function(*args)


class Numbers:
    """Converts between 0-d tensors on a device and the leaves of a rule that runs there.

    On a device leaves are the tensors themselves, so that nothing synchronizes. In host memory they are numpy scalars,
    which are ten times as fast as tiny tensor operations. Both give the same bits.

    Attributes:
        device: where the tensors are; None if that is not known yet.
        hosted: whether leaves are numpy scalars.
    """

    __slots__ = ("device", "hosted")

    def __init__(self, device: torch.device | None) -> None:
        self.device: torch.device | None
        self.hosted: bool
        self._use(device)

    def _use(self, device: torch.device | None) -> None:
        self.device = device
        # numpy 1 makes float64 of a float32 scalar times a Python number: with it, tensors are leaves everywhere.
        self.hosted = EXACT and device is not None and host_copy.in_host_memory(device)

    @property
    def xp(self) -> Any:
        """The namespace for leaves."""
        return SCALARS if self.hosted else torch

    def leaf(self, value: Any) -> Any:
        """Returns a 0-d tensor on the device as a leaf. Does not copy it where tensors are leaves.

        A numpy number, a default for what was not measured, is returned as it is.
        """
        return _NUMPY[value.dtype](read_now(value)) if self.hosted and isinstance(value, Tensor) else value

    def leaf_of(self, kept: Any, dtype: torch.dtype) -> Any:
        """Returns what `host_copy.kept` returned for a 0-d tensor of type `dtype`, as a leaf."""
        return _NUMPY[dtype](kept) if self.hosted else torch.as_tensor(kept, dtype=dtype, device=self.device)

    def tensor(self, leaf: Any) -> Tensor:
        """Returns a leaf as a 0-d tensor on the device. Does not synchronize with the device."""
        if isinstance(leaf, Tensor) or self.device is None:
            return torch.as_tensor(leaf, device=self.device)  # its own, not torch's default device
        # A number of numpy's: a leaf in host memory, or one that stands for what was not measured.
        return self._filled(leaf)

    def _filled(self, number: Any) -> Tensor:
        """Returns a number of numpy's as a 0-d tensor on the device."""
        # Filled in: a copy of the number to the device would synchronize. Exact through a Python number: a double holds
        # every float32 and int32.
        return torch.full((), number.item(), dtype=_TORCH[type(number)], device=self.device)

    def write(self, leaf: Any, target: Tensor) -> None:
        """Writes a leaf into a 0-d tensor of its type on the device. Does not synchronize with the device."""
        if self.hosted:
            target.fill_(leaf.item())
        else:
            target.copy_(self.tensor(leaf))

    def measurement(self, measurement: Measurement) -> Measurement:
        """Returns a measurement with leaves in place of tensors, without its sizes, which no decision needs."""
        total = self.leaf(measurement.total)
        # The norm is mostly the total itself, and stays so: what is the same is neither read nor checked twice.
        rest = [
            total if found is measurement.total else None if found is None else self.leaf(found)
            for found in measurement[2:]
        ]
        return Measurement(None, total, *rest)

    def leaves(self, seen: Seen) -> Seen:
        """Returns `seen` with leaves in place of tensors."""
        return Seen(*(self.leaf(getattr(seen, field.name)) for field in fields(Seen)))

    def tensors(self, seen: Seen) -> Seen:
        """Returns `seen` with tensors in place of leaves."""
        return Seen(*(self.tensor(getattr(seen, field.name)) for field in fields(Seen)))


_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.int32: np.int32, torch.bool: np.bool_}
_TORCH = {kind: dtype for dtype, kind in _NUMPY.items()}
