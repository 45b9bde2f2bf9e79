"""Module buffers, such as BatchNorm's running statistics, restored after skipped steps."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.torch.compat import is_exporting
from gradscale.torch.host import host_value, to_device


class BufferGuard:
    """Holds a copy of every buffer of some modules as it was before the forward passes of a step.

    A forward pass updates buffers before it is known that the step will be skipped. The first one after a step, of any
    of the modules and with gradients enabled, takes the copies, and `settle` restores them. Costs one copy of the
    buffers in memory. Does not synchronize with the device.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # Modules, not tensors: `to` and `load_state_dict(assign=True)` replace a module's buffers.
        self._modules = list(modules)
        self._forward_begun = False
        self._hook = _Hook(self)
        self._copies: dict[nn.Module, dict[str, Tensor]] = {}
        # The same as two lists, for a compiled forward pass.
        self._originals: list[Tensor] = []
        self._held: list[Tensor] = []
        self._copy()

    @torch.no_grad()
    def settle(self, applied: Tensor) -> None:
        """Keeps the buffers as they are where the step was applied; restores the copies where it was not.

        A buffer that is new, or has another shape than before, is kept as it is. If the next forward pass calls no
        hooks (`module.forward(x)`), what is kept or restored here is what the next skipped step goes back to.
        """
        if not host_value(applied):
            for part, copies in self._copies.items():
                for name, buffer in writable_buffers(part):
                    if name in copies and copies[name].shape == buffer.shape:
                        _restore(buffer, copies[name], applied)
        self._copy()
        self._forward_begun = False

    def _copy(self) -> None:
        """Takes a copy of every buffer, of modules that were added or replaced too."""
        parts = {part: dict(writable_buffers(part)) for module in self._modules for part in module.modules()}
        self._copies = {
            part: {name: buffer.detach().clone() for name, buffer in buffers.items()} for part, buffers in parts.items()
        }
        self._originals = [buffer for buffers in parts.values() for buffer in buffers.values()]
        self._held = [copy for copies in self._copies.values() for copy in copies.values()]
        self._register_hooks()

    def _register_hooks(self) -> None:
        for part, copies in self._copies.items():
            if (copies or part in self._modules) and self._hook not in part._forward_pre_hooks.values():
                part.register_forward_pre_hook(self._hook)
                part.register_load_state_dict_post_hook(self._hook.on_load)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Registers hooks of its own on the modules of a copy, whose hooks do nothing."""
        self.__dict__.update(state)
        self._hook = _Hook(self)
        self._register_hooks()  # and no copies: a forward pass may have begun since the last ones

    def before_forward(self) -> None:
        """Copies all buffers before the first forward pass since the last step that can be part of the next one."""
        # Without gradients it is an evaluation, or `update_bn`, and what it writes is to stay. An exported graph is no
        # part of the training, and must not hold the copies.
        if self._forward_begun or not torch.is_grad_enabled() or is_exporting():
            return
        self._forward_begun = True
        if torch.compiler.is_compiling():
            # Two lists are what the compiler can trace. A buffer that was replaced since the last step is left out.
            with torch.no_grad():
                torch._foreach_copy_(self._held, self._originals)  # pyright: ignore[reportPrivateImportUsage]
        else:
            self._copy()

    def on_load(self, module: nn.Module) -> None:
        """Copies loaded buffers, or a skipped step would undo the load if its forward pass calls no hooks."""
        if module in self._copies:  # a shallow copy of a part has the hook too, and is none of them
            self._copy()


class _Hook:
    """The hooks of a guard on its modules. Those of a copied module do nothing, until a copy of the guard adds its own.

    Otherwise a copy of one module, such as an average of its weights, would copy the guard, and with it all the others:
    a wrapper of `torch.compile` or `DistributedDataParallel`, which cannot be copied from inside.
    """

    def __init__(self, guard: BufferGuard | None = None) -> None:
        self._guard = guard

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()

    def __call__(self, module: nn.Module, args: Any) -> None:
        del module, args
        if self._guard is not None:
            self._guard.before_forward()

    def on_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        del incompatible_keys
        if self._guard is not None:
            self._guard.on_load(module)


def _restore(buffer: Tensor, copy: Tensor, applied: Tensor) -> None:
    """Writes the copy to the buffer unless `applied`, a 0-d bool, is set."""
    # A `where` on the device, for integer buffers too (`num_batches_tracked`): no host read.
    kept = torch.where(to_device(applied, buffer.device), buffer, copy.to(buffer))
    # Through `data`, which does not raise the version: BatchNorm saves its statistics for the backward pass without
    # using them there, and autograd would raise for a graph made before this write.
    buffer.data.copy_(kept)


def writable_buffers(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the module's own buffers that can be written to: not sparse, and no two elements in one place."""
    for name, buffer in part.named_buffers(recurse=False):
        if buffer.layout is torch.strided and all(
            step or size == 1 for size, step in zip(buffer.shape, buffer.stride(), strict=True)
        ):
            yield name, buffer
