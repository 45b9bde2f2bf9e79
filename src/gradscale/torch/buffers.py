"""Module buffers, such as BatchNorm's running statistics, kept clean of steps that were skipped."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class BufferGuard:
    """Holds a copy of a module's buffers as the last applied step left them.

    A forward pass updates buffers before anyone knows that the step will be skipped. `settle` then puts the copy back
    (or takes a new one) with a `where` on the device, so nothing waits. Costs one copy of the buffers in memory.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        for module in self._modules:
            module.register_load_state_dict_post_hook(self._on_load)
        self._copies: list[Tensor] = []
        self._buffers: list[Tensor] = []
        self._take()

    @torch.no_grad()
    def settle(self, applied: Tensor) -> None:
        """Keeps the buffers as they are where the step was applied; restores the copy where it was not."""
        if self._stale():
            self._take()
            return
        for buffer, copy in zip(self._buffers, self._copies, strict=True):
            settled = torch.where(applied.to(buffer.device, non_blocking=True), buffer, copy)
            buffer.copy_(settled)
            copy.copy_(settled)

    def _take(self) -> None:
        self._buffers = [buffer for module in self._modules for buffer in module.buffers()]
        self._copies = [buffer.detach().clone() for buffer in self._buffers]

    def _stale(self) -> bool:
        """Returns whether the modules hold other buffers than those copied, as after `module.to(...)`."""
        now = [buffer for module in self._modules for buffer in module.buffers()]
        return len(now) != len(self._buffers) or any(
            new is not old or new.device != copy.device or new.dtype != copy.dtype or new.shape != copy.shape
            for new, old, copy in zip(now, self._buffers, self._copies, strict=True)
        )

    def _on_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        del module, incompatible_keys
        self._take()
