"""Calls of TorchScript, whose operations torch does not report to modes: caught while a context needs it."""

import threading
from collections.abc import Callable, Iterator
from functools import reduce, wraps
from typing import Any

import torch

Call = Callable[..., Any]
Handler = Callable[[Any, Call], Call]
"""Returns what to call in place of a script's call, given both. It is asked in every thread."""


class _Scripts:
    """Replaces the calls of scripted and traced functions and methods while there is a handler."""

    # One for all contexts: two would each restore the other's replacement.

    def __init__(self) -> None:
        self._calls = {kind: kind.__call__ for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod)}
        self._lock = threading.Lock()
        self._handlers: tuple[Handler, ...] = ()

    def catch(self, handler: Handler) -> None:
        """Asks `handler` at every call of a script, as often as it is given, until it is released as often."""
        with self._lock:
            if not self._handlers:
                for kind, call in self._calls.items():
                    kind.__call__ = self._caught(call)  # type: ignore[method-assign]
            self._handlers = (*self._handlers, handler)

    def release(self, handler: Handler) -> None:
        """Puts the calls back if this was the last handler."""
        with self._lock:
            at = self._handlers.index(handler)
            self._handlers = self._handlers[:at] + self._handlers[at + 1 :]
            if not self._handlers:
                for kind, call in self._calls.items():
                    kind.__call__ = call  # type: ignore[method-assign]

    def _caught(self, call: Call) -> Call:
        @wraps(call)
        def caught(script: Any, *args: Any, **kwargs: Any) -> Any:
            def plain(*args: Any, **kwargs: Any) -> Any:
                return call(script, *args, **kwargs)

            handlers = dict.fromkeys(self._handlers)
            return reduce(lambda made, handler: handler(script, made), handlers, plain)(*args, **kwargs)

        return caught


SCRIPTS = _Scripts()


def operations(script: Any) -> set[str]:
    """Returns the names of all operations of a script, those in branches, loops and functions that it calls too."""
    return {kind.removeprefix("aten::") for kind in _kinds(script.inlined_graph)}


def _kinds(block: Any) -> Iterator[str]:
    for node in block.nodes():
        yield node.kind()
        for inner in node.blocks():
            yield from _kinds(inner)
