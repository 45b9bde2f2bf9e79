"""Counts what the host reads from a device, on any machine: a CPU is taken for an accelerator."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradscale.torch import host
from gradscale.torch.host import HostCopy

_SYNCHRONIZE = {"_local_scalar_dense", "item", "equal", "nonzero", "is_nonzero", "masked_select", "unique2"}
"""Operators whose result the host reads: they synchronize with the device."""


def _is_blocking_copy_to_host(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Returns whether an operator copies a tensor of a device to the host, which waits for it."""
    target = named.get("device")
    if name_of(func) != "_to_copy" or target is None or named.get("non_blocking"):
        return False
    return torch.device(target).type == "cpu" and not args[0].is_cpu


class HostReads(TorchDispatchMode):
    """Counts the operators inside the block that synchronize with the device.

        with HostReads() as counted:
            optimizer.step()
        print(counted.host_reads)

    Attributes:
        host_reads: the operators that synchronized with the device, in order. Scalers of gradscale take the CPU for an
            accelerator inside the block, so that what they would read there is counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host_reads: list[str] = []
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        """Begins to count."""
        tolist, send = Tensor.tolist, HostCopy.__init__
        sent: list[HostCopy] = []

        def counted(tensor: Tensor) -> Any:  # not an operator; what it calls may be one
            before = len(self.host_reads)
            numbers = tolist(tensor)
            self.host_reads[before:] = ["tolist"]
            return numbers

        def noted(copy: HostCopy, vector: Tensor) -> None:
            send(copy, vector)
            sent.append(copy)

        def is_late(copy: HostCopy) -> bool:  # sent inside the block: on an accelerator it may not have arrived
            return any(copy is each for each in sent)

        def read(copy: HostCopy) -> list[float]:
            before = len(self.host_reads)
            numbers = tolist(copy._host)
            self.host_reads[before:] = ["HostCopy"] if is_late(copy) else []
            return numbers  # type: ignore[return-value]

        for owner, name, instead in (
            (Tensor, "tolist", counted),
            (HostCopy, "__init__", noted),
            (HostCopy, "arrived", property(lambda copy: not is_late(copy))),
            (HostCopy, "read", read),
            (host, "in_host_memory", lambda device: False),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, instead))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Ends counting."""
        self._patches.close()
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one operator, and counts it."""
        del types
        result = func(*args, **(kwargs or {}))
        if name_of(func) in _SYNCHRONIZE or _is_blocking_copy_to_host(func, args, kwargs or {}):
            self.host_reads.append(name_of(func))
        return result


def name_of(func: Any) -> str:
    """Returns the name of an operator."""
    return func.overloadpacket.__name__
