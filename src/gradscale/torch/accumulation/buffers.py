"""Module buffers, such as BatchNorm's running statistics, restored after skipped steps."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class BufferGuard:
    """Holds a copy of every buffer of some modules as the last applied step left it.

    A forward pass updates buffers before it is known that the step will be skipped. `settle` then restores the copy, or
    takes a new one. Costs one copy of the buffers in memory. Does not synchronize with the device.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # Modules, not tensors: `to` and `load_state_dict(assign=True)` replace a module's buffers.
        self._parts = list({id(part): part for module in modules for part in module.modules()}.values())
        self._copies = [_copied(part) for part in self._parts]
        for part in self._parts:
            part.register_load_state_dict_post_hook(self._on_load)

    @torch.no_grad()
    def settle(self, applied: Tensor) -> None:
        """Keeps the buffers as they are where the step was applied; restores the copies where it was not.

        A buffer that is new, or has another shape than before, is kept as it is.
        """
        for part, copies in zip(self._parts, self._copies, strict=True):
            for name, buffer in _buffers(part):
                # A `where` on the device, for integer buffers too (`num_batches_tracked`): no host read.
                copy = copies.get(name, buffer)
                copy = copy.to(buffer) if copy.shape == buffer.shape else buffer
                settled = torch.where(applied.to(buffer.device, non_blocking=True), buffer, copy)
                # Through `data`, which does not raise the version: BatchNorm saves its statistics for the backward
                # pass without using them there, and autograd would raise for a graph made before this write.
                buffer.data.copy_(settled)
                copies[name] = settled

    def _on_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Copies loaded buffers, or a skipped step would undo the load. Called for every part that was loaded."""
        del incompatible_keys
        for index, part in enumerate(self._parts):
            if part is module:  # a shallow copy of a part has the hook too, and is none of them
                self._copies[index] = _copied(module)


def _copied(part: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in _buffers(part)}


def _buffers(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the module's own buffers that can be written to: not sparse, and no two elements in one place."""
    for name, buffer in part.named_buffers(recurse=False):
        if buffer.layout is torch.strided and all(
            step or size == 1 for size, step in zip(buffer.shape, buffer.stride(), strict=True)
        ):
            yield name, buffer
