"""Which operation each number that is not finite comes from."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradscale.torch.local import local
from gradscale.torch.probing.operation import Operation


@dataclass(frozen=True, slots=True)
class Origin:
    """Where numbers that are not finite come from.

    Attributes:
        operation: the first that returned them, or that was given them if they come from outside.
        outside: the tensor of the model that held them before the step, or `"an input"`; None if the operation made
            them.
        parameter: whether that tensor is a parameter or buffer of the model.
        intended: whether they are an infinity that was put there, such as the -inf of an attention mask.
        overflow: whether the operation gives finite numbers from the same inputs in float64; None if not known.
        frames: the operation and those before it.
    """

    operation: Operation
    outside: str | None = None
    parameter: bool = False
    intended: bool = False
    overflow: bool | None = None
    frames: tuple[Operation, ...] = ()


class Origins:
    """Origins by the memory that tensors are in.

    Every result of every operation passes through here, so that memory that is used again gets its new origin.
    """

    def __init__(self) -> None:
        self._by_memory: dict[int, Origin] = {}

    def of(self, tensor: Tensor) -> Origin | None:
        """Returns where the non-finite numbers in the memory of a tensor come from; None without such numbers."""
        return self._by_memory.get(_memory(tensor))

    def note(self, tensor: Tensor, origin: Origin | None, *, partly: bool = False) -> None:
        """Notes the origin of what was written to a tensor; None if it is finite.

        Where it was written `partly`, in place, the rest of the memory keeps its origin.
        """
        if origin is not None:
            self._by_memory[_memory(tensor)] = origin
        elif not partly or _fills_memory(tensor):
            self._by_memory.pop(_memory(tensor), None)

    def first(self, tensors: Iterable[Tensor]) -> Origin | None:
        """Returns the earliest origin of the tensors; None if all are finite."""
        found = [origin for tensor in tensors if (origin := self.of(tensor)) is not None]
        return min(found, key=lambda origin: origin.operation.index, default=None)


def inherited(inputs: Sequence[Origin], *, has_nan: bool, takes_masks: bool) -> Origin | None:
    """Returns the origin that a result has from the inputs of its operation; None if the operation is the origin.

    An intended infinity passes through an operation as an infinity. Where it becomes NaN in one that takes masks, as in
    a softmax over a row that is masked as a whole, that operation is the origin. Where it becomes NaN in another, as in
    a product, a tensor that it came in with was no mask.
    """
    certain = next((origin for origin in inputs if not (origin.intended and has_nan)), None)
    if certain is not None or takes_masks:
        return certain
    return next((replace(origin, intended=False) for origin in inputs if origin.outside is not None), None)


def has_infinite_number(args: Iterable[object]) -> bool:
    """Returns whether one of the arguments is an infinite number, which was put there on purpose."""
    return any(isinstance(arg, float) and math.isinf(arg) for arg in args)


def is_mask(tensor: Tensor) -> bool:
    """Returns whether all that is not finite in a tensor is -inf. Synchronizes with the device."""
    held = local(tensor.detach())
    return bool((torch.isfinite(held) | (held == -math.inf)).all()) if held.is_floating_point() else False


def _memory(tensor: Tensor) -> int:
    held = local(tensor)
    return (held._values() if held.is_sparse else held).untyped_storage().data_ptr()


def _fills_memory(tensor: Tensor) -> bool:
    held = local(tensor)
    return held.is_sparse or held.numel() * held.element_size() >= held.untyped_storage().nbytes()
