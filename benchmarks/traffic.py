"""Counts, operator by operator, how often a step reads and writes the memory of the gradients."""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.sides import StepSide
from torch import Tensor

from gradscale.checkup.host_reads import HostReads, name_of

OVERWRITES = {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_"}
"""Operators that write their first argument without reading it."""

SHAPE_ONLY = {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"}
"""Operators that read the shape of an argument and not its memory."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """How much gradient memory was read, and written."""

    read: int = 0
    written: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.read + other.read, self.written + other.written)


class Traffic(HostReads):
    """Counts the reads and writes of gradient memory inside the block, and what it allocates.

        with Traffic([parameter.grad for parameter in parameters]) as traffic:
            optimizer.step()
        print(traffic.passes_read, traffic.passes_written)

    An operator counts as one pass over each of its arguments, however often it is given the same one, and as a write
    where its schema has one. Views cost nothing. What happens inside of an operator is not seen: the temporaries of its
    kernel, or a skip of a fused optimizer by `found_inf`, which counts as applied.

    Args:
        gradients: dense tensors. Whatever shares their storage is gradient memory.

    Attributes:
        gradient_bytes: what one pass over the gradients is.
        by_operator: the bytes read and written by each operator.
        host_reads: as `HostReads` counts them.
        peak_allocated: the most bytes that tensors made inside took at one time.
    """

    def __init__(self, gradients: Iterable[Tensor] = ()) -> None:
        super().__init__()
        held = list(gradients)
        self.gradient_bytes = sum(gradient.nbytes for gradient in held)
        self.by_operator: dict[str, Bytes] = defaultdict(Bytes)
        self.peak_allocated = 0
        self._allocated = 0
        # Storages, not only addresses: a freed one's address could be reused by another tensor.
        self._storages = {_address(gradient): gradient.untyped_storage() for gradient in held}

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
        """Runs one operator, and counts it."""
        named = kwargs or {}
        result = super().__torch_dispatch__(func, types, args, named)
        given = set(map(_address, _tensors((args, *named.values()))))
        returned = {_address(tensor): tensor for tensor in _tensors(result)}
        self._note_made(tensor for address, tensor in returned.items() if address not in given)
        # By the returned memory, because not every schema declares a view: `_unsafe_view` does not.
        is_view = not func._schema.is_mutable and not given.isdisjoint(returned)
        if not is_view and name_of(func) not in SHAPE_ONLY:
            self._note_touched(func, args, named)
        return result

    def _note_touched(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Adds what one operator reads and writes of the gradients."""
        is_read: dict[tuple[int, int], bool] = defaultdict(bool)
        is_written: dict[tuple[int, int], bool] = defaultdict(bool)
        for tensor, reads, writes in _uses(func, args, kwargs):
            if _address(tensor) in self._storages:
                place = tensor.data_ptr(), tensor.nbytes
                is_read[place] |= reads
                is_written[place] |= writes
        for place in is_read:
            size = place[1]
            self.by_operator[name_of(func)] += Bytes(size * is_read[place], size * is_written[place])

    def _note_made(self, tensors: Iterable[Tensor]) -> None:
        """Adds the memory of new tensors, until it is given back."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._allocated += storage.nbytes()
            # `finalize` on the storage, not on the tensor: views may keep the memory after the tensor is freed.
            weakref.finalize(storage, self._note_freed, storage.nbytes()).atexit = False
        self.peak_allocated = max(self.peak_allocated, self._allocated)

    def _note_freed(self, size: int) -> None:
        self._allocated -= size


def count(side: StepSide) -> Traffic:
    """Returns the traffic of the second step: the first one creates the optimizer's state."""
    side.turn()
    side.prepare()
    with Traffic([parameter.grad for parameter in side.parameters if parameter.grad is not None]) as traffic:
        side.run()
    return traffic


def _uses(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, bool, bool]]:
    """Yields the tensors that an operator is given, each with whether it is read and whether it is written."""
    # By their schema fused optimizers write gradients. They do so only with a `grad_scale` to divide them by.
    keeps_gradients = name_of(func).startswith("_fused_") and kwargs.get("grad_scale") is None
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        writes = argument.is_write and not (keeps_gradients and argument.name == "grads")
        reads = not (writes and (argument.is_out or name_of(func) in OVERWRITES))
        for tensor in _tensors(value):
            yield tensor, reads, writes


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the dense tensors in an argument or a result that have memory: one, or those in nested lists."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided and value.numel():
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
