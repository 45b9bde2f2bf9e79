"""Kernels of the simulated device: each runs the CPU's operator on the same memory.

A tensor of the device is a CPU tensor whose DLPack label says that it belongs to another kind of device. A kernel turns
the labels back, runs the operator of the CPU, and labels what comes out. What CUDA refuses is refused.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from tests.torch.sim import host
from torch import Tensor

NAME = "sim"

Kernel = Callable[..., Any]

_CPU, _EXTENSION = 1, 12  # DLPack's kDLCPU and kDLExtDev
_below_autograd = torch._C._AutoDispatchBelowAutograd  # pyright: ignore[reportAttributeAccessIssue]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def here(value: Any) -> bool:
    """Returns whether a value is a tensor of the simulated device."""
    return isinstance(value, Tensor) and value.device.type == NAME


def _labelled(tensor: Tensor, kind: int) -> Tensor:
    """Returns the same memory as a tensor of the other device."""
    capsule = torch._C._to_dlpack(tensor)  # pyright: ignore[reportAttributeAccessIssue]
    # The device follows the pointer to the memory in DLPack's `DLTensor`: its kind and its index.
    (ctypes.c_int32 * 2).from_address(_pointer(capsule, b"dltensor") + 8)[:] = (kind, 0)
    other = torch._C._from_dlpack(capsule)  # pyright: ignore[reportAttributeAccessIssue]
    return torch._conj(other) if tensor.is_conj() else other  # pyright: ignore[reportPrivateImportUsage]


def on_host(tensor: Tensor) -> Tensor:
    """Returns the memory of a tensor, wherever it is, as a CPU tensor."""
    return _labelled(tensor, _CPU) if here(tensor) else tensor


def on_device(tensor: Tensor) -> Tensor:
    """Returns the memory of a CPU tensor as a tensor of the simulated device."""
    return _labelled(tensor, _EXTENSION)


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs any operator that has no kernel of its own below."""
    facts = _facts_of(op)
    if facts.waits:
        host.note_read(facts.name)
    call = _Call(facts, args, kwargs)
    with _below_autograd():
        given = call.down(args)
        named = {name: call.down(value) for name, value in kwargs.items()}
        made = _overload(op, facts, given)(*given, **named)
        call.write_outs()
        return call.up(made)


class _Call:
    """The tensors of one call: of the device, and of the CPU on the same memory."""

    def __init__(self, facts: "_Facts", args: Any, kwargs: dict[str, Any]) -> None:
        self._facts = facts
        self._lr = kwargs.get("lr")
        self._outs = _only_written(facts, args, kwargs) if facts.outs else {}
        self._there: dict[int, Tensor] = {}  # the CPU's, by the ids of the device's
        self._ours: dict[int, Tensor] = {}  # and back

    def down(self, value: Any) -> Any:
        """Returns an argument as the CPU's operator must be given it."""
        if isinstance(value, list | tuple):
            return [self.down(each) for each in value]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        if not here(value):
            self._refuse_unless_taken(value)
            return value
        if id(value) not in self._there:
            # What is written to an `out` is copied there afterwards: the CPU's operator may resize it, and memory that
            # belongs to another tensor cannot be resized.
            alias = torch.empty_like(value, device="cpu") if id(value) in self._outs else on_host(value)
            self._there[id(value)], self._ours[id(alias)] = alias, value
        return self._there[id(value)]

    def up(self, made: Any) -> Any:
        """Returns a result as a tensor of the device: the argument itself if that is what came back."""
        if isinstance(made, list | tuple):
            return [self.up(each) for each in made]
        if not isinstance(made, Tensor):
            return made
        return self._ours[id(made)] if id(made) in self._ours else on_device(made)

    def write_outs(self) -> None:
        for key, out in self._outs.items():
            made = self._there[key]
            if made.shape == out.shape:
                on_host(out).copy_(made)
            else:
                out.set_(on_device(made))  # type: ignore[arg-type]

    def _refuse_unless_taken(self, tensor: Tensor) -> None:
        """Raises torch's error for a CPU tensor where CUDA takes none."""
        facts = self._facts
        # Fused optimizers take a learning rate from the host.
        if facts.takes_indices or (facts.takes_numbers and tensor.dim() == 0) or tensor is self._lr:
            return
        found = f"found {NAME}:0 and {tensor.device} in {facts.name}"
        raise RuntimeError(f"Expected all tensors to be on the same device, but {found}")


class _Facts(NamedTuple):
    """What is known of an operator from its schema.

    Attributes:
        name: with its namespace.
        waits: whether the host must know the result to go on.
        takes_numbers: whether 0-d tensors of the CPU are taken: they travel with the launch of the kernel.
        takes_indices: whether indices may be on the CPU.
        tensors: the positions of its arguments that are tensors.
        outs: the names of its arguments that are only written.
    """

    name: str
    waits: bool
    takes_numbers: bool
    takes_indices: bool
    tensors: list[int]
    outs: list[str]


@cache
def _facts_of(op: Any) -> _Facts:
    name, arguments = op._schema.name, op._schema.arguments
    return _Facts(
        name,
        waits=bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(op.tags)),
        takes_numbers=torch.Tag.pointwise in op.tags or "_foreach_" in name,
        takes_indices=name.startswith(("aten::index", "aten::_index_put", "aten::_unsafe_index")),
        tensors=[index for index, it in enumerate(arguments) if isinstance(it.type, torch.TensorType)],
        outs=[argument.name for argument in arguments if argument.is_out],
    )


def _only_written(facts: _Facts, args: Any, kwargs: dict[str, Any]) -> dict[int, Tensor]:
    """Returns the `out` tensors that are not read as well, by their ids."""
    read = {id(each) for each in _flat(args)}
    outs = _flat([kwargs.get(name) for name in facts.outs])
    return {id(out): out for out in outs if here(out) and id(out) not in read}


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        yield from _flat(value) if isinstance(value, list | tuple) else [value]


def _overload(op: Any, facts: _Facts, args: list[Any]) -> Any:
    """Returns the operator that takes `args`: torch hands over numbers that it had wrapped as tensors as numbers."""
    given = (args[index] for index in facts.tensors if index < len(args))
    return op.overloadpacket if any(isinstance(each, int | float | complex) for each in given) else op


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copies between the host and the device, or within the device."""
    what = f"copy of {list(source.shape)}"
    with _below_autograd():
        if here(target):
            if not (here(source) or non_blocking):
                host.note_upload(what)
            on_host(target).copy_(on_host(source))
        elif non_blocking:
            host.send(target, on_host(source))
        else:
            host.note_read(what)
            target.copy_(on_host(source))
    return target


def to_copy(
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """`Tensor.to`. torch's own kernel asks for pinned memory, which a device written in Python does not have."""
    out = torch.empty_like(
        tensor,
        dtype=dtype,
        device=tensor.device if device is None else device,
        memory_format=memory_format or torch.preserve_format,
    )
    return copy_from(tensor, out, non_blocking)


def item(tensor: Tensor) -> Any:
    host.note_read("item")
    with _below_autograd():
        return on_host(tensor).item()


def empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    form = memory_format or torch.contiguous_format
    return on_device(torch.empty(size, dtype=dtype, device="cpu", memory_format=form))


def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return on_device(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def of_the_cpu(op: Any) -> Kernel:
    """Returns the CPU's own kernel, for operators that do not look at the memory and keep the storage."""
    return lambda *args, **kwargs: op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


def convolution(*args: Any) -> Tensor:
    """What torch calls for a device that it does not know, since it would choose a library by the device otherwise."""
    return fallback(torch.ops.aten.convolution.default, *args)


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *args: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    *settings, wanted = args
    bias_sizes = [weight.shape[0]]
    return fallback(torch.ops.aten.convolution_backward.default, grad, x, weight, bias_sizes, *settings, wanted)
