"""Stand-ins: how calls of a Python function are caught, which torch tells nothing of."""

import sys
import threading
from collections.abc import Iterator
from functools import cache, reduce, wraps
from types import FunctionType
from typing import Any, NamedTuple

from gradscale.torch.casting.names import Function
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


class StandIn:
    """Takes a Python function's place, in its class or in all modules that know it, while anyone wants it to.

    All threads then call the stand-in; in one where no rule holds for the function it just passes the call on.
    """

    def __init__(self, function: FunctionType) -> None:
        @wraps(function)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            rule = rule_for(function)
            return function(*args, **kwargs) if rule is None else rule.run(function, args, kwargs, op=False)

        _ORIGINALS[stand_in] = function
        self._function = function
        self._stand_in = stand_in
        self._places: list[tuple[Place, Any]] = []
        self._modules_seen = 0
        self._wanted = 0

    def look_around(self) -> bool:
        """Finds the places to take, again if modules have been imported since; returns whether there are any."""
        with _LOCK:
            if self._modules_seen != len(sys.modules) and not self._wanted:
                self._modules_seen = len(sys.modules)
                self._places = [(place, place.get()) for place in _places(self._function)]
            return bool(self._places)

    def take(self) -> None:
        with _LOCK:
            self._wanted += 1
            for place, found in self._places:
                place.put(staticmethod(self._stand_in) if isinstance(found, staticmethod) else self._stand_in)

    def leave(self) -> None:
        with _LOCK:
            self._wanted -= 1
            if not self._wanted:
                for place, found in self._places:
                    place.put(found)


_LOCK = threading.Lock()
_ORIGINALS: dict[Function, FunctionType] = {}


@cache
def stand_in_for(function: FunctionType) -> StandIn:
    """Returns the function's stand-in: one for all who want it, as two would put each other back into its place."""
    return StandIn(function)


def original(function: Function) -> Function:
    """Returns the function itself where `function` is the stand-in that has taken its place."""
    return _ORIGINALS.get(function, function)


def _places(function: FunctionType) -> Iterator[Place]:
    *path, name = function.__qualname__.split(".")
    if not path:
        yield from _in_modules(function)
        return
    module = sys.modules.get(function.__module__)
    # A decorator that keeps the name of what it wraps does not keep the namespace: hence both.
    for space in (function.__globals__, {} if module is None else vars(module)):
        owner = reduce(lambda found, part: getattr(found, part, None), path[1:], space.get(path[0]))
        held = vars(owner).get(name) if isinstance(owner, type) else None
        if isinstance(owner, type) and getattr(held, "__func__", held) is function:
            yield Place(owner, name)
            return


def _in_modules(function: FunctionType) -> Iterator[Place]:
    """Yields every name, in any module, that stands for the function: `from library import function` makes one more."""
    spaces = [function.__globals__, *(getattr(module, "__dict__", {}) for module in list(sys.modules.values()))]
    for space in {id(space): space for space in spaces}.values():
        yield from (Place(space, name) for name, value in list(space.items()) if value is function)
