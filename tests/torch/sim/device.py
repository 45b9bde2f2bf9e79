"""A simulated accelerator, device "sim": CPU memory that torch takes for a device's.

It shows without a GPU what code does on one. Host reads and blocking uploads are counted (`host.waits`), copies to the
host hold garbage until they have arrived, and CPU tensors are refused where CUDA refuses them. Its memory and its
numbers are the CPU's.
"""

from functools import cache, partial
from typing import Any

import torch
from tests.torch.sim import autocast, host, kernels
from tests.torch.sim.kernels import NAME
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

KEEPS_STORAGE = (
    "resize_",
    "as_strided",
    "view",
    "unfold",
    "_reshape_alias",
    "set_.source_Tensor",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
)


class Module(_DummyBackendModule):
    """What `torch.sim` is."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def synchronize(self, device: Any = None) -> None:
        host.note_read("synchronize")


class Generator(torch.Generator):
    """A generator of the CPU where one of the device is asked for: torch cannot make one for a device in Python."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        kind = "cpu" if torch.device(device).type == NAME else device
        return super().__new__(cls, kind)  # pyright: ignore[reportCallIssue]


@cache
def install() -> None:
    """Registers the device with torch, for the rest of the process. torch has one place for a device of others."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    torch.Event, torch.Generator = host.Event, Generator  # type: ignore[misc]
    _register_kernels()
    original = torch.UntypedStorage.clone
    torch.UntypedStorage.clone = lambda storage: _cloned(storage, original)  # type: ignore[method-assign]
    torch.serialization.register_package(0, lambda storage: None, _restore)  # type: ignore[arg-type]  # for torch.load


def _register_kernels() -> None:
    every, aten = (torch.library.Library(name, "IMPL") for name in ("_", "aten"))
    _register_kernels.libraries = every, aten  # type: ignore[attr-defined]  # what they register ends with them
    every.fallback(kernels.fallback, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    own: dict[str, kernels.Kernel] = {
        "_copy_from": kernels.copy_from,
        "_to_copy": kernels.to_copy,
        "_local_scalar_dense": kernels.item,
        "empty.memory_format": kernels.empty,
        "empty_strided": kernels.empty_strided,
        "convolution_overrideable": kernels.convolution,
        "convolution_backward_overrideable": kernels.convolution_backward,
    }
    own |= {name: kernels.of_the_cpu(_op(name)) for name in KEEPS_STORAGE}
    # Functional and in-place operators go straight to the CPU's, not by way of an `out` that torch would allocate.
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutogradNonFunctional"):
        short = name.removeprefix("aten::")
        own.setdefault(short, partial(kernels.fallback, _op(short)))
    for name, kernel in own.items():
        aten.impl(name, kernel, "PrivateUse1")
    # Otherwise a lazy conjugate is resolved by a copy, which resolves it by a copy, and so on.
    aten.impl("_copy_from", torch.library.fallthrough_kernel, "Conjugate")
    for name in autocast.NARROW + autocast.WIDE:
        aten.impl(name, autocast.casting(_op(name), name in autocast.WIDE), "AutocastPrivateUse1")


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _cloned(storage: torch.UntypedStorage, original: Any) -> torch.UntypedStorage:
    """Returns a copy of a storage, for `copy.deepcopy`: torch's own needs an allocator, which this device has not."""
    if storage.device.type != NAME:
        return original(storage)
    return torch.empty(0, dtype=torch.uint8, device=NAME).set_(storage).clone().untyped_storage()


def _restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    if not location.startswith(NAME):
        return None
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).to(NAME).untyped_storage()
