"""Float32 memory for a step: gradients of masters, and their values where these are not stored."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.local import local
from gradscale.torch.masters.distributed import distributed_as


class StepBuffer:
    """Float32 memory, one block for each device, that is reused for one part of the model after the other."""

    def __init__(self) -> None:
        self._blocks: dict[torch.device, Tensor] = {}

    def __reduce__(self) -> tuple[type["StepBuffer"], tuple[()]]:
        """A copy starts empty."""
        return StepBuffer, ()

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns an uninitialized float32 tensor for each, on its device and with its memory layout, without gaps.

        They are valid until the next call, which returns the same memory.
        """
        begins: list[int] = []
        elements: dict[torch.device, int] = defaultdict(int)
        for tensor in tensors:
            begins.append(elements[tensor.device])
            elements[tensor.device] += tensor.numel()
        blocks = {device: self._block(device, count) for device, count in elements.items()}
        # One view each: a view of a piece that `split` returns takes three times as long.
        return [
            blocks[tensor.device].as_strided(tensor.shape, _stride(tensor), begin)
            for tensor, begin in zip(tensors, begins, strict=True)
        ]

    def _block(self, device: torch.device, elements: int) -> Tensor:
        block = self._blocks.get(device)
        if block is None or block.numel() < elements:
            block = self._blocks[device] = torch.empty(elements, dtype=torch.float32, device=device)
        return block


def _stride(tensor: Tensor) -> Sequence[int]:
    """Returns the strides of a copy without gaps.

    Fused kernels walk through memory linearly, and so need all their tensors in one layout: channels-last, too.
    """
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def _placed_gradient(weight: Tensor) -> Any:
    """Returns the gradient of a weight, after it was placed as the weight is: each rank may hold the whole of it."""
    grad: Any = weight.grad
    if hasattr(grad, "placements") and grad.placements != weight.placements:  # type: ignore[attr-defined]
        grad = weight.grad = grad.redistribute(placements=weight.placements)  # type: ignore[attr-defined]
    return grad


def set_gradients(masters: Sequence[Tensor], weights: Sequence[Tensor], buffer: StepBuffer) -> None:
    """Sets the gradient of every master to that of its weight: the same tensor if it is float32, else a cast.

    One multi-tensor kernel casts all that need it, into `buffer`. A sparse gradient is cast separately.
    """
    to_cast: list[tuple[Tensor, Tensor]] = []
    for master, weight in zip(masters, weights, strict=True):
        grad = _placed_gradient(weight)
        if grad is None:
            continue
        if grad.layout is not torch.strided:
            master.grad = grad.float()
        elif grad.dtype is torch.float32 and local(grad).stride() == local(master).stride():
            master.grad = grad
        else:
            to_cast.append((master, grad))
    if not to_cast:
        return
    cast = buffer.like([local(master) for master, _ in to_cast])
    torch._foreach_copy_(cast, [local(grad) for _, grad in to_cast])  # pyright: ignore[reportPrivateImportUsage]
    for (master, grad), part in zip(to_cast, cast, strict=True):
        master.grad = distributed_as(grad, part)
