"""`casts` and its decorators: which functions run in which precision, on top of autocast or without it."""

from collections.abc import Iterable, Mapping
from contextlib import ContextDecorator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gradscale.torch.cast import HALF_DTYPES
from gradscale.torch.casting.catching import RULES, Function, Patch, patch_for, plain_name, torch_aliases
from gradscale.torch.casting.rules import Ban, Cast, Precision, bans, float_function, half_function, promote_function
from gradscale.torch.scripts import SCRIPTS, Call, operations

__all__ = ["casts", "float_function", "half_function", "promote_function"]


class casts(TorchFunctionMode, ContextDecorator):
    """Runs the listed functions in the precision they are listed under, and rejects unsafe ones in half precision.

    >>> x = torch.full((4,), 300.0, dtype=torch.float16)
    >>> x.square()
    tensor([inf, inf, inf, inf], dtype=torch.float16)
    >>> with casts(float=[torch.square]):
    ...     x.square()
    tensor([90000., 90000., 90000., 90000.])

    Also a decorator. Floating-point tensors in the arguments are cast, in nested containers too; gradients have the
    dtypes that the arguments had. A function is the object that is called: one of torch's, with all its aliases; an
    operator of `torch.ops`; a Python function or method of any library, or of your own.

    Contexts nest: the inner one takes precedence, and the outer one holds for what it does not list. Other threads are
    not affected. Every call of a torch function inside takes some microseconds longer. Does not synchronize with the
    device.

    Args:
        half: run in half precision.
        float: run in float32, with autocast disabled.
        promote: run in the widest dtype among the arguments.
        dtype: the half dtype, FP16 or BF16; by default autocast's own where autocast is enabled, and FP16 elsewhere.
        banned: functions that must not get half-precision tensors, with the reason, beside the known unsafe ones.
        allow: functions that may get them although they are known to be unsafe.

    Raises:
        TypeError: calls of a function cannot be caught.
        ValueError: a function is listed twice, or is unsafe in half precision.
        RuntimeError: inside, an unsafe function gets half-precision tensors, or TorchScript with a listed function is
            called.
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
        if dtype is not None and dtype not in HALF_DTYPES:
            raise ValueError(f"`dtype` must be torch.float16 or torch.bfloat16. Received: dtype={dtype!r}.")
        super().__init__()
        self._rules: dict[Function, Cast | Ban] = {}
        self._patches: list[Patch] = []
        self._allowed = {alias for function in allow for alias in _caught("allow", function)}
        lists: dict[Precision, Iterable[Function]] = {"half": half, "float": float, "promote": promote}
        for to, functions in lists.items():
            for function in functions:
                self._list(to, function, Cast(to, bool(torch_aliases(function)), dtype))
        for function, reason in (banned or {}).items():
            self._list("banned", function, Ban(reason))

    def __enter__(self) -> "casts":
        outer = bans() | RULES.items[-1]
        # `allow` lifts bans, not casts of an outer context.
        lifted = {alias: None for alias in self._allowed if isinstance(outer.get(alias), Ban)}
        RULES.items.append(outer | lifted | self._rules)
        for patch in self._patches:
            patch.install()
        SCRIPTS.catch(_checked)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        SCRIPTS.release(_checked)
        for patch in self._patches:
            patch.remove()
        RULES.items.pop()

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns the result of a call of a torch function, under the rule that holds for it."""
        rule, kwargs = RULES.items[-1].get(func), kwargs or {}
        if rule is None:
            return func(*args, **kwargs)
        # torch calls the modes of outer contexts next, and their rules must not be applied as well.
        RULES.items.append({})
        try:
            return rule(func, args, kwargs)
        finally:
            RULES.items.pop()

    def _list(self, parameter: str, function: Function, rule: Cast | Ban) -> None:
        aliases = _caught(parameter, function)
        if aliases & self._rules.keys():
            raise ValueError(
                "A function must be listed once, under one of its names. "
                f"Received: {_named(function)} in `{parameter}`, and before. Take it out of one of the two."
            )
        if parameter == "half" and (ban := bans().get(function)) and not aliases <= self._allowed:
            raise ValueError(
                "`half` must not list functions that are unsafe in half precision. "
                f"Received: {_named(function)}. {ban.reason} "
                "To allow it: `casts(half=[...], allow=[...])`."
            )
        self._rules |= dict.fromkeys(aliases, rule)
        if not torch_aliases(function):
            self._patches.append(patch_for(function))


def _caught(parameter: str, function: Any) -> frozenset[Function]:
    """Returns the objects by which calls of a listed function are recognized: its aliases in torch, or itself."""
    name = plain_name(function)
    if aliases := torch_aliases(function):
        if parameter != "allow" and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))):
            raise TypeError(
                f"`{parameter}` must not list functions that write to their argument: they would write to a copy. "
                f"Received: {_named(function)}. List the one that returns its result, and call that."
            )
        return aliases
    if isinstance(function, FunctionType) and patch_for(function).places():
        return frozenset([patch_for(function).function])
    raise TypeError(
        f"`{parameter}` takes functions whose calls can be caught: torch's own, operators of `torch.ops`, and Python "
        f"functions and methods found under their name in a module or class. Received: {_named(function)}. "
        + (
            "Name a method of the class, such as `LayerNorm.forward`."
            if isinstance(function, type | nn.Module)
            else "Call it from a function decorated with `half_function`, `float_function` or `promote_function`."
        )
    )


def _named(function: Any) -> str:
    name = getattr(function, "__qualname__" if isinstance(function, FunctionType) else "__name__", None)
    return f"`{name}`" if name else f"an object of {type(function).__name__}"


def _checked(script: Any, call: Call) -> Call:
    """Returns the call of a script, unless this thread has a rule for one of its operations, which does not hold there.

    Raises:
        RuntimeError: an operation of the script is listed.
    """
    listed = {plain_name(function) for function, rule in RULES.items[-1].items() if isinstance(rule, Cast)}
    if found := sorted(listed & operations(script)):
        raise RuntimeError(
            "`casts` does not reach into TorchScript: a listed function would run in the precision of its arguments. "
            f"Received: a scripted or traced function with {', '.join(found[:5])}. Run the Python function, for all "
            "scripts by PYTORCH_JIT=0, or leave these out of the lists."
        )
    return call
