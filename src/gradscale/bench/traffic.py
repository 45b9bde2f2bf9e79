"""Counting, operator by operator, how often a step reads and writes the memory of the gradients."""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradscale.bench.steps import StepSide

OVERWRITES = {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_"}
"""Operators that write their first argument without reading it."""

SHAPE_ONLY = {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"}
"""Operators that take the shape of an argument and leave its memory alone."""

READS = {"_local_scalar_dense", "item", "equal", "nonzero", "is_nonzero", "masked_select", "unique2"}
"""Operators whose outcome the host has to know before it can go on."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Gradient memory that was read, and written."""

    read: int = 0
    written: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.read + other.read, self.written + other.written)


class Traffic(TorchDispatchMode):
    """Counts what the code inside does to the memory of `gradients`.

        with Traffic([parameter.grad for parameter in parameters]) as traffic:
            optimizer.step()
        print(traffic.passes_read, traffic.passes_written)

    An operator is taken to go over each of its arguments once, however often it is named there, and to write those that
    its schema says it changes. Views cost nothing. What an operator does inside is not seen, nor whether a fused kernel
    was told to skip: that is counted as if it had been applied.

    Args:
        gradients: dense tensors; whatever shares their storage is gradient memory.

    Attributes:
        gradient_bytes: what one pass over the gradients is.
        by_operator: the bytes read and written by each operator.
        host_reads: the operators whose outcome the host had to wait for, in order.
        peak_allocated: the most bytes that tensors made inside took at one time.
    """

    def __init__(self, gradients: Iterable[Tensor] = ()) -> None:
        super().__init__()
        # Held on to, so that no other tensor can be given their memory.
        self._storages = {gradient.untyped_storage().data_ptr(): gradient.untyped_storage() for gradient in gradients}
        self.gradient_bytes = sum(storage.nbytes() for storage in self._storages.values())
        self.by_operator: dict[str, Bytes] = defaultdict(Bytes)
        self.host_reads: list[str] = []
        self.peak_allocated = 0
        self._allocated = 0

    @property
    def total(self) -> Bytes:
        """The bytes read and written by all operators."""
        return sum(self.by_operator.values(), Bytes())

    @property
    def passes_read(self) -> float:
        """How often the gradients were read."""
        return self.total.read / self.gradient_bytes

    @property
    def passes_written(self) -> float:
        """How often the gradients were written."""
        return self.total.written / self.gradient_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in READS:
            self.host_reads.append(name)
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, tuple(kwargs.values())))}
        made = [tensor for tensor in _tensors(result) if tensor.untyped_storage().data_ptr() not in given]
        self._note_made(made)
        is_view = not func._schema.is_mutable and len(made) < len(list(_tensors(result)))
        if not is_view and name not in SHAPE_ONLY:
            self._note_touched(name, _uses(func, args, kwargs))
        return result

    def _note_touched(self, name: str, uses: Iterable[tuple[Tensor, bool]]) -> None:
        """Adds what one operator reads and writes of the gradients."""
        touched: dict[tuple[int, int], bool] = {}
        for tensor, is_written in uses:
            if tensor.untyped_storage().data_ptr() in self._storages:
                place = (tensor.data_ptr(), tensor.nbytes)
                touched[place] = touched.get(place, False) or is_written
        for (_, size), is_written in touched.items():
            is_read = not (is_written and name in OVERWRITES)
            self.by_operator[name] += Bytes(size * is_read, size * is_written)

    def _note_made(self, tensors: Iterable[Tensor]) -> None:
        """Adds the memory of new tensors, until it is given back."""
        for storage in {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}.values():
            self._allocated += storage.nbytes()
            weakref.finalize(storage, self._note_freed, storage.nbytes()).atexit = False
        self.peak_allocated = max(self.peak_allocated, self._allocated)

    def _note_freed(self, size: int) -> None:
        self._allocated -= size


def count(side: StepSide) -> Traffic:
    """Returns what one step of `side` does, once an earlier step has made the state of its optimizer."""
    side.turn()
    side.prepare()
    with Traffic([parameter.grad for parameter in side.parameters if parameter.grad is not None]) as traffic:
        side.run()
    return traffic


def _uses(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Yields the tensors an operator is given, each with whether it writes there."""
    # Fused optimizers declare that they write gradients, but do so only where they divide them by a scale.
    spares_gradients = func.overloadpacket.__name__.startswith("_fused_") and kwargs.get("grad_scale") is None
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value):
            yield tensor, is_written and not (spares_gradients and argument.name == "grads")


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the dense tensors in an argument or a result: one, a list, or a tuple of lists."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
