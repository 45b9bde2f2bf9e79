"""The aliases of torch's functions, and the functions whose calls torch reports to modes."""

from collections.abc import Callable
from functools import cache
from itertools import chain
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import get_overridable_functions

Function = Callable[..., Any]
Aliases = frozenset[Function]


def torch_aliases(function: Function) -> Aliases:
    """Returns the function and all its aliases in torch; nothing where torch does not report its calls.

    `torch.softmax`, `torch.nn.functional.softmax`, `torch.special.softmax` and `Tensor.softmax` are one function, and
    so are `torch.matmul` and `@`. An operator of `torch.ops` is one function with its overloads.
    """
    if isinstance(function, OpOverload):
        function = function.overloadpacket
    if isinstance(function, OpOverloadPacket):
        return frozenset([function, *(getattr(function, name) for name in function.overloads())])
    return _index().by_function.get(function, frozenset())


def in_place_aliases(function: Function) -> Aliases:
    """Returns the variants of a torch function that write to their argument: none where it has none."""
    return _index().by_name.get(f"{plain_name(function.__name__)}_", frozenset())


def writes_in_place(function: Function) -> bool:
    """Returns whether a torch function writes to its argument, by its name."""
    name = plain_name(function.__name__)
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def describe(function: Any) -> str:
    """Returns the name of a function for an error message."""
    attribute = "__qualname__" if isinstance(function, FunctionType) else "__name__"
    name = getattr(function, attribute, None)
    return f"`{name}`" if name else f"an object of {type(function).__name__}"


class _Index(NamedTuple):
    """The functions whose calls torch reports: by their plain name, and for each function its aliases."""

    by_name: dict[str, Aliases]
    by_function: dict[Function, Aliases]


@cache
def _index() -> _Index:
    # Functions with the same plain name are aliases. torch's own list lacks some that write to their argument, such as
    # `torch.relu_`.
    in_place = [getattr(torch, name) for name in dir(torch) if name.endswith("_") and not name.startswith("_")]
    found: dict[str, set[Function]] = {}
    for function in chain(in_place, *get_overridable_functions().values()):
        if function.__name__ != "__get__":  # the name of every property
            found.setdefault(plain_name(function.__name__), set()).add(function)
    by_name = {name: frozenset(functions) for name, functions in found.items()}
    return _Index(by_name, {function: names for names in by_name.values() for function in names})


_OPERATORS = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "div",
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow",
    "matmul": "matmul",
}


def plain_name(name: str) -> str:
    """Returns "logit" for `special_logit`, "div" for `__rtruediv__` and "add_" for `__iadd__`."""
    if not (name.startswith("__") and name.endswith("__")):
        return name.removeprefix("special_")
    bare = name.strip("_")
    if bare in _OPERATORS:
        return _OPERATORS[bare]
    operator = _OPERATORS.get(bare[1:])
    if operator is None or bare[0] not in "ri":
        return name
    return f"{operator}_" if bare[0] == "i" else operator
