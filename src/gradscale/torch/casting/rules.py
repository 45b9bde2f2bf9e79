"""The rules that hold for calls, and the contexts that brought them: a stack of its own for every thread."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gradscale.torch.casting.names import Function


class Rule(Protocol):
    """What becomes of a call."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, op: bool) -> Any:
        """Returns what `function` makes of the arguments, or of others in their place.

        Args:
            function: what was called.
            args: with these.
            kwargs: and these.
            op: whether `function` is an operation of torch's, not a Python function.
        """
        ...


Rules = dict[Function, Rule]


class _Active(threading.local):
    """The rules of the contexts that this thread is in, innermost last: all that hold there, not only its own."""

    def __init__(self) -> None:
        self.stack: list[Rules] = []


_ACTIVE = _Active()


def current() -> Rules | None:
    """Returns the rules that hold in this thread; None outside of every context."""
    return _ACTIVE.stack[-1] if _ACTIVE.stack else None


def rule_for(function: Function) -> Rule | None:
    """Returns the rule that holds for a function in this thread."""
    return _ACTIVE.stack[-1].get(function) if _ACTIVE.stack else None


def enter(rules: Rules) -> None:
    """Lets `rules`, and no others, hold in this thread."""
    _ACTIVE.stack.append(rules)


def leave() -> None:
    """Lets the rules hold again that did before."""
    _ACTIVE.stack.pop()
