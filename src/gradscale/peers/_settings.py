"""Kinds of other systems' settings: refused where the system itself refuses them, or fails with them.

A rule annotates its keywords with them. The name in a message is the system's own.
"""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_type_hints

from gradscale.policies.checks import as_single, check_count, check_number
from gradscale.policies.static import Static

P = ParamSpec("P")
R = TypeVar("R")


def kind(rule: str, holds: Callable[[float], bool]) -> Callable[[str, float], float]:
    """Returns a check of numbers, which "must" what `rule` says."""

    def check(name: str, value: float) -> float:
        check_number(name, value)
        if not holds(value):
            raise ValueError(f"`{name}` must {rule}. Received: {name}={value!r}.")
        return value

    return check


_positive = kind("be positive and finite", lambda x: 0 < x < math.inf)


def _whole(name: str, value: float) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    check_count(name, value)  # pyright: ignore[reportArgumentType]
    return int(value)


def _count(name: str, value: int) -> int:
    check_count(name, value)
    return value


def _count_or_zero(name: str, value: int) -> int:
    return _count(name, value) if value else 0


Positive = Annotated[float, _positive]
"""Above zero and finite."""

Growth = Annotated[float, kind("be greater than 1 and finite", lambda x: 1 < x < math.inf)]
Backoff = Annotated[float, kind("be between 0 and 1", lambda x: 0 < x < 1)]

Float32 = Annotated[float, _positive, kind("fit a float32 tensor", lambda x: 0 < as_single("value", x) < math.inf)]
"""Positive, and neither 0 nor infinite in a float32 tensor."""

Limit = Annotated[float, kind("not be negative or NaN", lambda x: x >= 0)]
"""A bound that may have no effect: from zero up, infinity included."""

Count = Annotated[int, _count]
"""From 1 up."""

CountOrZero = Annotated[int, _count_or_zero]

Whole = Annotated[int, _whole]
"""From 1 up, and `1000.0` too: for systems that compare or divide in Python."""


@functools.cache
def _kinds(annotated: Any) -> list[tuple[str, bool, tuple[Callable[[str, Any], Any], ...]]]:
    """Returns the annotated keywords of a function, or fields of a class: may it be None, and its checks."""
    kinds: list[tuple[str, bool, tuple[Callable[[str, Any], Any], ...]]] = []
    for name, hint in get_type_hints(annotated, include_extras=True).items():
        options = (hint, *get_args(hint))  # of `Limit | None`, both
        checks = next((option.__metadata__ for option in options if hasattr(option, "__metadata__")), ())
        kinds.append((name, type(None) in options, checks))
    return kinds


def _settled(annotated: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that are given, checked and converted."""
    settled = dict(given)
    for name, optional, checks in _kinds(annotated):
        for check in checks if name in given and not (optional and given[name] is None) else ():
            settled[name] = check(name, settled[name])
    return settled


def checked(rule: Callable[P, R]) -> Callable[P, R]:
    """Returns `rule`, which then gets what its settings are checked and converted to.

    With `enabled=False` nothing is checked, as in a scaler that is switched off.
    """

    @functools.wraps(rule)
    def checking(*args: P.args, **kwargs: P.kwargs) -> R:
        call = inspect.signature(rule).bind(*args, **kwargs)
        given = call.arguments
        if False not in (given.get("enabled"), given.get("enable")):
            given.update(_settled(rule, given))
        return rule(*call.args, **call.kwargs)

    return checking


def check_fields(policy: Any) -> None:
    """Checks and converts the settings of a policy, in its `__post_init__`."""
    settings = {field.name: getattr(policy, field.name) for field in fields(policy)}
    for name, value in _settled(type(policy), settings).items():
        object.__setattr__(policy, name, value)


def static_as(name: str, default: Any = inspect.Parameter.empty) -> Callable[..., Static]:
    """Returns the rule of a fixed scale that a system calls `name`. `Static` skips a step that overflows by itself."""

    def rule(*args: Any, **kwargs: Any) -> Static:
        return Static(*signature.bind(*args, **kwargs).args or (default,))

    setting = inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
    rule.__signature__ = signature = inspect.Signature([setting])  # type: ignore[attr-defined]
    return rule
