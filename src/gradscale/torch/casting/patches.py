"""Patches of Python functions, whose calls torch does not report: they are replaced while a context needs it."""

import sys
import threading
from collections.abc import Iterator
from functools import cache, reduce, wraps
from types import FunctionType
from typing import Any, NamedTuple

from gradscale.torch.casting.aliases import Function
from gradscale.torch.casting.rules import rule_for


class Place(NamedTuple):
    """Where a Python function is looked up: in the namespace of a module, or in a class."""

    owner: dict[str, Any] | type
    name: str

    def get(self) -> Any:
        return (self.owner if isinstance(self.owner, dict) else vars(self.owner)).get(self.name)

    def put(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


class Patch:
    """Replaces a Python function, in its class or in all modules that refer to it, while any context uses the patch.

    All threads call the replacement then. In a thread without a rule for the function it calls the original.
    """

    def __init__(self, function: FunctionType) -> None:
        @wraps(function)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            rule = rule_for(function)
            return function(*args, **kwargs) if rule is None else rule.run(function, args, kwargs, op=False)

        _ORIGINALS[replacement] = function
        self._function = function
        self._replacement = replacement
        self._places: list[tuple[Place, Any]] = []
        self._modules_searched = 0
        self._users = 0

    def find_places(self) -> bool:
        """Searches for the function, again if modules have been imported since; returns whether it was found."""
        with _LOCK:
            # Not while the patch is in use: the search would find the replacement in place of the function.
            if self._modules_searched != len(sys.modules) and not self._users:
                self._modules_searched = len(sys.modules)
                self._places = [(place, place.get()) for place in _places(self._function)]
            return bool(self._places)

    def install(self) -> None:
        """Replaces the function, for one more user."""
        with _LOCK:
            self._users += 1
            for place, found in self._places:
                place.put(staticmethod(self._replacement) if isinstance(found, staticmethod) else self._replacement)

    def remove(self) -> None:
        """Puts the function back if this was the last user."""
        with _LOCK:
            self._users -= 1
            if not self._users:
                for place, found in self._places:
                    place.put(found)


_LOCK = threading.Lock()
_ORIGINALS: dict[Function, FunctionType] = {}


@cache
def patch_for(function: FunctionType) -> Patch:
    """Returns the patch of a function. One for all contexts: two would each restore the other's replacement."""
    return Patch(function)


def original(function: Function) -> Function:
    """Returns the function itself where `function` is its replacement."""
    return _ORIGINALS.get(function, function)


def _places(function: FunctionType) -> Iterator[Place]:
    *path, name = function.__qualname__.split(".")
    if not path:
        yield from _in_modules(function)
        return
    module = sys.modules.get(function.__module__)
    # Both namespaces: a decorator that copies the name of the function it wraps does not copy its globals.
    for space in (function.__globals__, {} if module is None else vars(module)):
        owner = reduce(lambda found, part: getattr(found, part, None), path[1:], space.get(path[0]))
        held = vars(owner).get(name) if isinstance(owner, type) else None
        if isinstance(owner, type) and getattr(held, "__func__", held) is function:
            yield Place(owner, name)
            return


def _in_modules(function: FunctionType) -> Iterator[Place]:
    """Yields every name of the function in any module: `from library import function` makes one more."""
    spaces = [function.__globals__, *(getattr(module, "__dict__", {}) for module in list(sys.modules.values()))]
    for space in {id(space): space for space in spaces}.values():
        yield from (Place(space, name) for name, value in list(space.items()) if value is function)
