"""Where an operation was called: the path of its module, and the line of the user's program."""

import linecache
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import nn

from gradscale.torch.probing.operation import Source
from gradscale.torch.wrappers import own_module, own_name

LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (torch.__file__, sys.modules["gradscale"].__file__ or "")
)
"""Folders whose lines are not the user's."""

Module = tuple[str | None, str]
"""Path and class of a module; (None, "") is outside of the model."""

OUTSIDE: Module = (None, "")


class ModuleStack:
    """The modules whose forward pass runs now, by hooks on all of them.

    Args:
        modules: those whose submodules are named. With several, the index comes first, as in the names of parameters.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        several = len(modules) > 1
        self._running: list[Module] = []
        self._named: dict[nn.Module, Module] = {}
        for index, root in enumerate(map(own_module, modules)):
            for name, part in root.named_modules():
                path = own_name(name, root) if name else ""
                where = ".".join(filter(None, [str(index), path])) if several else path
                self._named.setdefault(part, (where, type(part).__name__))

    @property
    def innermost(self) -> Module:
        """The module whose forward pass runs now, and none further in."""
        return self._running[-1] if self._running else OUTSIDE

    def owner(self, name: str) -> Module:
        """Returns the module that holds the parameter or buffer with this name."""
        path = name.rpartition(".")[0]
        return next((module for module in self._named.values() if module[0] == path), OUTSIDE)

    @contextmanager
    def followed(self) -> Generator[None]:
        """Keeps the stack while the block runs."""
        handles: list[Any] = []
        for part in self._named:
            handles.append(part.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(part.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            self._running.clear()
            for handle in handles:
                handle.remove()

    def _enter(self, part: nn.Module, args: Any) -> None:
        self._running.append(self._named[part])

    def _leave(self, part: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()


def users_line(outermost: CodeType) -> Source | None:
    """Returns the innermost line that is neither torch's nor gradscale's; None if there is none inside `outermost`.

    Args:
        outermost: the code that called the user's: lines outside of it did not call the operation.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        file = frame.f_code.co_filename
        if not file.startswith((*LIBRARIES, "<frozen ")):
            text = linecache.getline(file, frame.f_lineno).strip()
            return Source(file, frame.f_lineno, frame.f_code.co_name, text)
        frame = frame.f_back
    return None
