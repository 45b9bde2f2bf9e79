"""Calls of TorchScript, whose operations torch does not report to modes: caught while a block is open."""

import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gradscale.torch.emulation.mode import EmulationMode

CurrentMode = Callable[[], "EmulationMode | None"]


class ScriptPatch:
    """Replaces the calls of scripted and traced functions and methods while any thread has a block open.

    Args:
        current: returns the mode of the calling thread, or None where it has none.
    """

    def __init__(self, current: CurrentMode) -> None:
        self._calls = {kind: kind.__call__ for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod)}
        self._current = current
        self._lock = threading.Lock()
        self._users = 0

    def install(self) -> None:
        """Replaces the calls, for one more block."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                for kind, call in self._calls.items():
                    kind.__call__ = _caught(call, self._current)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Puts the calls back if this was the last block."""
        with self._lock:
            self._users -= 1
            if not self._users:
                for kind, call in self._calls.items():
                    kind.__call__ = call  # type: ignore[method-assign]


def _caught(call: Callable[..., Any], current: CurrentMode) -> Callable[..., Any]:
    @wraps(call)
    def caught(script: Any, *args: Any, **kwargs: Any) -> Any:
        mode = current()
        if mode is None:
            return call(script, *args, **kwargs)
        names = {kind.removeprefix("aten::") for kind in _kinds(script.inlined_graph)}
        return mode.run_scripted(names, lambda *args, **kwargs: call(script, *args, **kwargs), args, kwargs)

    return caught


def _kinds(block: Any) -> Iterator[str]:
    """Yields the kinds of all operations of a graph, those inside branches and loops too."""
    for node in block.nodes():
        yield node.kind()
        for inner in node.blocks():
            yield from _kinds(inner)
