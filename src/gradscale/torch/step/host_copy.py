"""Numbers on their way from the device to the host, so that nobody has to wait for them."""

import torch
from torch import Tensor


class Letter:
    """A few device numbers, sent to the host without waiting.

    On the CPU they are there at once. On an accelerator the copy runs behind the work already queued, and an event
    says when it has arrived.
    """

    __slots__ = ("_arrival", "_host")

    def __init__(self, *values: Tensor) -> None:
        packed = torch.stack([value.detach().to(torch.float32) for value in values])
        self._arrival: torch.Event | None = None
        self._host = packed
        if packed.device.type != "cpu":
            self._host = packed.to("cpu", non_blocking=True)
            self._arrival = torch.Event(packed.device)
            self._arrival.record()

    @property
    def arrived(self) -> bool:
        """Whether `read` would return at once."""
        return self._arrival is None or self._arrival.query()

    def read(self) -> list[float]:
        """Returns the numbers. Waits for the device until they have arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._host.tolist()


def free_to_look(device: torch.device) -> bool:
    """Returns whether what is on `device` is in the host's memory, so that to look at it waits for nothing."""
    return device.type == "cpu"


def on_host(value: Tensor) -> float | None:
    """Returns a number that is in the host's memory already, or None for one on another device. Never waits."""
    return peek(value) if free_to_look(value.device) else None


def peek(value: Tensor) -> float:
    """Returns a number that is in the host's memory. Only for where `free_to_look` holds."""
    return value.tolist()  # type: ignore[return-value]
