"""Catches calls of functions: torch reports those of its own to modes, and Python functions are replaced."""

import re
import sys
import threading
from collections.abc import Callable
from functools import cache, reduce, wraps
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch.overrides import get_overridable_functions

Function = Callable[..., Any]

_OPERATOR = re.compile(r"__([ri]?)(add|sub|mul|div|truediv|floordiv|mod|pow|matmul)__")
_CALLED = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}


class PerThread(threading.local):
    """A list that each thread has for itself, with `first` in it."""

    def __init__(self, *first: Any) -> None:
        self.items = list(first)


RULES = PerThread({})
"""For each context that a thread is in, innermost last: the rule of each function, those of outer contexts included.

A rule returns the result of a call, given the function and its arguments. None is a ban that is lifted."""


def torch_aliases(function: Function) -> frozenset[Function]:
    """Returns the function with its aliases in torch, operators included; nothing where torch does not report calls."""
    aliases = functions_by_name().get(plain_name(function), frozenset())
    return aliases if function in aliases else frozenset()


@cache
def functions_by_name() -> dict[str, frozenset[Function]]:
    """Returns the functions whose calls torch reports, by their plain name. Those with the same one are aliases."""
    # torch's own list lacks some that write to their argument, such as `torch.relu_`.
    in_place = [getattr(torch, name) for name in dir(torch) if name.endswith("_") and not name.startswith("_")]
    found: dict[str, set[Function]] = {}
    for function in chain(in_place, *get_overridable_functions().values()):
        if function.__name__ != "__get__":  # the name of every property
            found.setdefault(plain_name(function), set()).add(function)
    return {name: frozenset(functions) for name, functions in found.items()}


def plain_name(function: Any) -> str:
    """Returns "logit" for `special_logit`, "div" for `__rtruediv__` and "add_" for `__iadd__`."""
    name = getattr(function, "__name__", "")
    operator = _OPERATOR.fullmatch(name)
    if operator is None:
        return name.removeprefix("special_")
    kind, called = operator.groups()
    return _CALLED.get(called, called) + ("_" if kind == "i" else "")


class Patch:
    """Replaces a Python function in its class, or in all modules that hold it, while any thread needs its calls."""

    def __init__(self, function: FunctionType) -> None:
        @wraps(function)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            rule = RULES.items[-1].get(function)
            return function(*args, **kwargs) if rule is None else rule(function, args, kwargs)

        *path, _ = function.__qualname__.split(".")
        owner = reduce(lambda found, part: getattr(found, part, None), path, sys.modules.get(function.__module__))
        owners = [owner] if path else list(sys.modules.values())
        held = [(owner, *item) for owner in owners for item in list(getattr(owner, "__dict__", {}).items())]
        self.places = [(owner, name) for owner, name, value in held if value is function]
        self.function, self.replacement, self._users = function, replacement, 0

    @staticmethod
    def of(function: FunctionType) -> "Patch":
        """Returns the patch of a function or replacement. One for all contexts: two would each restore the other's."""
        with _LOCK:
            if function not in _PATCHES:
                patch = Patch(function)
                _PATCHES.update({function: patch, patch.replacement: patch})
            return _PATCHES[function]

    def add_users(self, count: int) -> None:
        """Replaces the function for so many more users, or fewer, and puts it back if none is left."""
        with _LOCK:
            self._users += count
            for owner, name in self.places:
                setattr(owner, name, self.replacement if self._users else self.function)


_LOCK = threading.Lock()
_PATCHES: dict[Function, Patch] = {}
