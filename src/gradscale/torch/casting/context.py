"""`casts`: which functions run in which precision, on top of autocast or without it."""

from collections.abc import Iterable, Mapping
from contextlib import ContextDecorator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gradscale.torch.casting import rules
from gradscale.torch.casting.arguments import Cast
from gradscale.torch.casting.banned import HALVES, Ban, bans
from gradscale.torch.casting.names import Function, Names, title, torch_names, writes_in_place
from gradscale.torch.casting.rules import Rule, Rules
from gradscale.torch.casting.stand_in import StandIn, original, stand_in_for


class casts(TorchFunctionMode, ContextDecorator):
    """Runs the listed functions in the precision they are listed under, and refuses unsafe ones in half precision.

    >>> x = torch.full((4,), 300.0, dtype=torch.float16)
    >>> x.square()
    tensor([inf, inf, inf, inf], dtype=torch.float16)
    >>> with casts(float=[torch.square]):
    ...     x.square()
    tensor([90000., 90000., 90000., 90000.])

    Also a decorator. Floating-point tensors in the arguments are cast, in nested lists, tuples and dicts too; gradients
    come back in the types that the arguments had. A function is the object that is called: one of torch's, which counts
    under all its names; an operator of `torch.ops`; a Python function or method of any library, or of your own.

    Contexts nest: the inner one decides, what it does not list is as outside. Other threads are not affected. Every
    call of a torch function inside costs some microseconds more. Nothing waits for the device.

    Args:
        half: run in half precision.
        float: run in float32, with autocast off inside.
        promote: run in the widest type among the arguments.
        dtype: what half is, FP16 or BF16; by default autocast's own type where autocast is on, and FP16 elsewhere.
        banned: functions that must not get half-precision tensors, with the reason, beside those known to be unsafe.
        allow: functions that may get them although they are banned.

    Raises:
        TypeError: calls of a function cannot be caught.
        ValueError: a function is listed twice, or is unsafe in half precision.
    """

    def __init__(
        self,
        *,
        half: Iterable[Function] = (),
        float: Iterable[Function] = (),
        promote: Iterable[Function] = (),
        dtype: torch.dtype | None = None,
        banned: Mapping[Function, str] | None = None,
        allow: Iterable[Function] = (),
    ) -> None:
        if dtype is not None and dtype not in HALVES:
            raise ValueError(f"`dtype` must be torch.float16 or torch.bfloat16. Received: dtype={dtype!r}.")
        super().__init__()
        self._rules: Rules = {}
        self._stand_ins: list[StandIn] = []
        self._allowed = {name for function in allow for name in _names("allow", original(function))}
        self._list("half", half, Cast("half", dtype))
        self._list("float", float, Cast("float"))
        self._list("promote", promote, Cast("promote"))
        for function, reason in (banned or {}).items():
            self._list("banned", [function], Ban(reason))

    def __enter__(self) -> "casts":
        outer = rules.current()
        rules.enter(self._over(bans() if outer is None else outer))
        for stand_in in self._stand_ins:
            stand_in.take()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for stand_in in self._stand_ins:
            stand_in.leave()
        rules.leave()

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns what a function of torch's makes of its arguments, cast.

        Args:
            func: what was called.
            types: not used.
            args: with these.
            kwargs: and these.
        """
        rule, kwargs = rules.rule_for(func), kwargs or {}
        if rule is None:
            return func(*args, **kwargs)
        rules.enter({})  # torch asks the outer contexts next, and they must leave it at that
        try:
            return rule.run(func, args, kwargs, op=True)
        finally:
            rules.leave()

    def _list(self, parameter: str, functions: Iterable[Function], rule: Rule) -> None:
        for function in map(original, functions):
            names = _names(parameter, function)
            if names & self._rules.keys():
                raise ValueError(
                    "A function must be listed once, under whatever name. "
                    f"Received: {title(function)} in `{parameter}`, and before. Take it out of one of the two."
                )
            if parameter == "half" and (ban := bans().get(function)) and not names <= self._allowed:
                raise ValueError(
                    f"`half` must not list functions that are unsafe in half precision. Received: {title(function)}. "
                    f"{ban.reason} If you know better: `casts(half=[...], allow=[...])`."
                )
            if not torch_names(function):
                self._stand_ins.append(stand_in_for(function))
            self._rules |= dict.fromkeys(names, rule)

    def _over(self, outer: Mapping[Function, Rule]) -> Rules:
        lifted = {name for name in self._allowed if isinstance(outer.get(name), Ban)}
        return {name: rule for name, rule in outer.items() if name not in lifted} | self._rules


def _names(parameter: str, function: Function) -> Names:
    """Returns the objects by which calls of a listed function are known: its names in torch, or itself."""
    names = torch_names(function)
    if names and parameter != "allow" and writes_in_place(function):
        raise TypeError(
            f"`{parameter}` must not list functions that write to their argument: they would write to a copy. "
            f"Received: {title(function)}. List the one that returns its result, and call that."
        )
    if names or (isinstance(function, FunctionType) and stand_in_for(function).look_around()):
        return names or frozenset([function])
    raise TypeError(
        f"`{parameter}` takes functions whose calls can be caught: torch's own, operators of `torch.ops`, and Python "
        f"functions and methods found under their name in a module or class. Received: {title(function)}. "
        + _way_out(function)
    )


def _way_out(function: Any) -> str:
    if isinstance(function, type | nn.Module):
        return "Name a method of the class, such as `LayerNorm.forward`."
    return "Call it from a function decorated with `half_function`, `float_function` or `promote_function`."
