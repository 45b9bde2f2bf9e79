"""Finds the calls of a function: torch reports those of its own functions to modes, and Python functions are replaced.

Both look for the rule that holds for the function in the thread that calls it.
"""

import re
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache, partial, reduce, wraps
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
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
    """Returns the function and all its aliases in torch; nothing where torch does not report its calls.

    `torch.softmax`, `torch.nn.functional.softmax`, `torch.special.softmax` and `Tensor.softmax` are one function, and
    so are `torch.matmul` and `@`. An operator of `torch.ops` is one function with its overloads.
    """
    if isinstance(function, OpOverload):
        function = function.overloadpacket
    if isinstance(function, OpOverloadPacket):
        return frozenset([function, *(getattr(function, name) for name in function.overloads())])
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
    """Replaces a function wherever owners hold it, while any context uses the patch. All threads call the replacement.

    Args:
        function: the function.
        replacement: what is called instead.
        owners: returns the modules or classes to look in.
    """

    def __init__(self, function: Function, replacement: Function, owners: Callable[[], Iterable[Any]]) -> None:
        self.function, self.replacement, self._owners = function, replacement, owners
        self._places: list[tuple[Any, str, bool]] = []
        self._modules_searched = self._users = 0

    def install(self) -> None:
        """Replaces the function, for one more user."""
        with _LOCK:
            self._users += 1
            self._put(self.replacement)

    def remove(self) -> None:
        """Puts the function back if this was the last user."""
        with _LOCK:
            self._users -= 1
            if not self._users:
                self._put(self.function)

    def _put(self, function: Function) -> None:
        for owner, name, is_static in self.places():
            setattr(owner, name, staticmethod(function) if is_static else function)

    def places(self) -> list[tuple[Any, str, bool]]:
        """Returns the owner and the name of each place that holds the function, and whether it is a static method.

        To look in all modules takes milliseconds. It is done again only if modules have been imported since.
        """
        if self._modules_searched != (modules := len(sys.modules)):
            self._places = [
                (owner, name, type(held) is staticmethod)
                for owner in self._owners()
                for name, held in list(getattr(owner, "__dict__", {}).items())
                # `type`, since modules hold objects that warn when `isinstance` looks at them.
                for plain in [held.__func__ if type(held) is staticmethod else held]
                if plain is self.function or plain is self.replacement
            ]
            self._modules_searched = modules
        return self._places


_LOCK = threading.Lock()
_PATCHES: dict[Function, Patch] = {}


def patch_for(function: FunctionType) -> Patch:
    """Returns the patch of a function or replacement. One for all contexts: two would each restore the other's.

    A method is looked for in its class, any other function in all modules: `from library import function` makes one
    more place. In a thread without a rule for the function the replacement calls the original.
    """
    with _LOCK:
        if function in _PATCHES:
            return _PATCHES[function]

        @wraps(function)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            rule = RULES.items[-1].get(function)
            return function(*args, **kwargs) if rule is None else rule(function, args, kwargs)

        *path, _ = function.__qualname__.split(".")
        owner = reduce(lambda found, part: getattr(found, part, None), path, sys.modules.get(function.__module__))
        patch = Patch(function, replacement, lambda: [owner] if path else list(sys.modules.values()))
        _PATCHES.update({function: patch, replacement: patch})
        return patch


SCRIPT_HANDLERS: list[Callable[[Any, Function], Function]] = []
"""Return what to call in place of a script's call, given both. They look for contexts of the thread that calls."""


def _script_patch(kind: Any) -> Patch:
    call = vars(kind)["__call__"]

    @wraps(call)
    def caught(script: Any, *args: Any, **kwargs: Any) -> Any:
        run: Function = partial(call, script)
        for handler in SCRIPT_HANDLERS:
            run = handler(script, run)
        return run(*args, **kwargs)

    return Patch(call, caught, lambda: [kind])


SCRIPTS = [_script_patch(kind) for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod)]
"""The calls of TorchScript, whose operations torch does not report to modes."""


def operations(script: Any) -> set[str]:
    """Returns the names of all operations of a script, those in branches, loops and functions that it calls too."""
    blocks, found = [script.inlined_graph], set[str]()
    for block in blocks:
        for node in block.nodes():
            found.add(node.kind().removeprefix("aten::"))
            blocks += node.blocks()
    return found
