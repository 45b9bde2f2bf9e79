"""Copies of device numbers in host memory, made in the background."""

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A copy of a few device numbers in host memory, made without synchronizing.

    On the CPU it is ready at once. On an accelerator the copy is queued behind earlier work, and an event is recorded
    after it.
    """

    __slots__ = ("_arrival", "_host")

    def __init__(self, *values: Tensor) -> None:
        # One float32 vector, one transfer. Flags are exact in it, and so are counts up to 2**24.
        packed = torch.stack([value.detach().to(torch.float32) for value in values])
        self._arrival: torch.Event | None = None
        self._host = packed
        if packed.device.type != "cpu":
            self._host = packed.to("cpu", non_blocking=True)
            # Recorded after the copy on the same stream: the host memory is not valid before the event is reached.
            self._arrival = torch.Event(packed.device)
            self._arrival.record()

    @property
    def arrived(self) -> bool:
        """Whether `read` would return at once."""
        return self._arrival is None or self._arrival.query()

    def read(self) -> list[float]:
        """Returns the numbers. Synchronizes with the device until they have arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._host.tolist()


def moved(value: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns `value` on `device`. Synchronizes only where it is copied to the host: gradients may be kept there."""
    if value.device == device and dtype is None:
        return value
    # Memory of the host is not valid before a copy has arrived; on a device, kernels are queued behind the copy.
    return value.to(device, dtype, non_blocking=device.type != "cpu")


def in_host_memory(device: torch.device) -> bool:
    """Returns whether what is on `device` is in host memory, so that reading it does not synchronize."""
    return device.type == "cpu"


def host_value(value: Tensor) -> float | None:
    """Returns a number that is in host memory, or None for one on another device. Never synchronizes."""
    return read_now(value) if in_host_memory(value.device) else None


def kept(value: Tensor) -> Any:
    """Returns what a 0-d tensor is now, whatever is written to it later: a copy, in host memory just the number."""
    return value.clone() if (number := host_value(value)) is None else number


def put(value: Any, target: Tensor) -> None:
    """Writes what `kept` returned for `target` into it."""
    if isinstance(value, Tensor):
        target.copy_(value)
    else:
        target.fill_(value)


def shown(value: Any) -> Any:
    """Returns a number that is in host memory, and for a tensor on another device the text `<on ...>`."""
    if not isinstance(value, Tensor):
        return value.item() if hasattr(value, "item") else value
    number = host_value(value)
    return f"<on {value.device}>" if number is None else number


def read_now(value: Tensor) -> float:
    """Returns a number that is in host memory. Only for where `in_host_memory` holds."""
    return value.tolist()  # type: ignore[return-value]
