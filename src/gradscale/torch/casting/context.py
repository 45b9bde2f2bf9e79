"""`casts`: which functions run in which precision, on top of autocast or without it."""

from collections.abc import Iterable, Mapping
from contextlib import ContextDecorator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gradscale.torch.cast import HALF_DTYPES
from gradscale.torch.casting import rules
from gradscale.torch.casting.aliases import Aliases, Function, describe, plain_name, torch_aliases, writes_in_place
from gradscale.torch.casting.banned import Ban, bans
from gradscale.torch.casting.patches import Patch, original, patch_for
from gradscale.torch.casting.rules import Cast, Rule, Rules
from gradscale.torch.scripts import SCRIPTS, Call, operations


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
        self._rules: Rules = {}
        self._patches: list[Patch] = []
        self._allowed = {alias for function in allow for alias in _aliases("allow", original(function))}
        self._list("half", half, Cast("half", dtype))
        self._list("float", float, Cast("float"))
        self._list("promote", promote, Cast("promote"))
        for function, reason in (banned or {}).items():
            self._list("banned", [function], Ban(reason))

    def __enter__(self) -> "casts":
        outer = rules.current()
        rules.push(self._over(bans() if outer is None else outer))
        for patch in self._patches:
            patch.install()
        SCRIPTS.catch(_checked)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        SCRIPTS.release(_checked)
        for patch in self._patches:
            patch.remove()
        rules.pop()

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns the result of a call of a torch function, under the rule that holds for it."""
        rule, kwargs = rules.rule_for(func), kwargs or {}
        if rule is None:
            return func(*args, **kwargs)
        # torch calls the modes of outer contexts next, and their rules must not be applied as well.
        rules.push({})
        try:
            return rule.run(func, args, kwargs, op=True)
        finally:
            rules.pop()

    def _list(self, parameter: str, functions: Iterable[Function], rule: Rule) -> None:
        for function in map(original, functions):
            aliases = _aliases(parameter, function)
            if aliases & self._rules.keys():
                raise ValueError(
                    "A function must be listed once, under one of its names. "
                    f"Received: {describe(function)} in `{parameter}`, and before. Take it out of one of the two."
                )
            if parameter == "half" and (ban := bans().get(function)) and not aliases <= self._allowed:
                raise ValueError(
                    "`half` must not list functions that are unsafe in half precision. "
                    f"Received: {describe(function)}. {ban.reason} "
                    "To allow it: `casts(half=[...], allow=[...])`."
                )
            if not torch_aliases(function):
                self._patches.append(patch_for(function))
            self._rules |= dict.fromkeys(aliases, rule)

    def _over(self, outer: Mapping[Function, Rule]) -> Rules:
        # `allow` lifts bans, not casts of an outer context.
        lifted = {alias for alias in self._allowed if isinstance(outer.get(alias), Ban)}
        return {alias: rule for alias, rule in outer.items() if alias not in lifted} | self._rules


def _checked(script: Any, call: Call) -> Call:
    """Returns the call of a script, unless this thread has a rule for one of its operations, which does not hold there.

    Raises:
        RuntimeError: an operation of the script is listed.
    """
    listed = {
        plain_name(function.__name__) for function, rule in (rules.current() or {}).items() if isinstance(rule, Cast)
    }
    if found := sorted(listed & operations(script)):
        raise RuntimeError(
            "`casts` does not reach into TorchScript: a listed function would run in the precision of its arguments. "
            f"Received: a scripted or traced function with {', '.join(found[:5])}. Run the Python function, for all "
            "scripts by PYTORCH_JIT=0, or leave these out of the lists."
        )
    return call


def _aliases(parameter: str, function: Function) -> Aliases:
    """Returns the objects by which calls of a listed function are recognized: its aliases in torch, or itself."""
    aliases = torch_aliases(function)
    if aliases and parameter != "allow" and writes_in_place(function):
        raise TypeError(
            f"`{parameter}` must not list functions that write to their argument: they would write to a copy. "
            f"Received: {describe(function)}. List the one that returns its result, and call that."
        )
    if aliases or (isinstance(function, FunctionType) and patch_for(function).find_places()):
        return aliases or frozenset([function])
    raise TypeError(
        f"`{parameter}` takes functions whose calls can be caught: torch's own, operators of `torch.ops`, and Python "
        f"functions and methods found under their name in a module or class. Received: {describe(function)}. "
        + _alternative(function)
    )


def _alternative(function: Any) -> str:
    if isinstance(function, type | nn.Module):
        return "Name a method of the class, such as `LayerNorm.forward`."
    return "Call it from a function decorated with `half_function`, `float_function` or `promote_function`."
