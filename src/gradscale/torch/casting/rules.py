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
    """The contexts that this thread is in, innermost last, each with all rules that hold there."""

    def __init__(self) -> None:
        self.stack: list[tuple[object, Rules]] = []


_ACTIVE = _Active()


def enter(owner: object, rules: Rules) -> None:
    """Lets `rules`, and no others, hold in this thread."""
    _ACTIVE.stack.append((owner, rules))


def leave() -> None:
    """Lets the rules hold again that did before."""
    _ACTIVE.stack.pop()


def current() -> tuple[object | None, Rules]:
    """Returns the innermost context that this thread is in, if any, and all rules that hold there."""
    return _ACTIVE.stack[-1] if _ACTIVE.stack else (None, {})
