"""Values from files, in error messages: a file must not decide how long a message is."""

import reprlib
from collections.abc import Iterable
from itertools import islice
from typing import Any

MOST_KEYS = 20
"""Keys that a message lists. The longest list that a system saves, Paddle's, has 8."""


class _Short(reprlib.Repr):
    """Python's own short forms, and those of values that it would spell out before it cuts them."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2  # six items on each of six levels would be 46,656
        self.maxother = 120
        self.maxstring = 80

    def repr_bytes(self, value: bytes, level: int) -> str:
        """Returns the start of `value`: four characters for each byte would be made otherwise."""
        del level
        return repr(value) if len(value) <= self.maxstring else f"{value[: self.maxstring]!r}..."

    repr_bytearray = repr_bytes

    def repr_int(self, x: int, level: int) -> str:
        """Returns the digits of `x`, or their size where Python would need quadratic time or refuse."""
        return super().repr_int(x, level) if x.bit_length() <= 1024 else f"<{x.bit_length()} bits>"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Returns the first items of `x`. Python's own form sorts all keys."""
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)


_SHORT = _Short()


def short(value: Any) -> str:
    """Returns `repr(value)`, cut short."""
    return _SHORT.repr(value)


def shown(value: Any) -> str:
    """Returns a value and its type, cut short.

    >>> shown("x" * 1000)[-5:]
    '(str)'
    """
    return f"{short(value)} ({type(value).__name__})"


def shown_keys(keys: Iterable[Any]) -> str:
    """Returns keys as a sorted list of strings, the first 20 of them.

    >>> shown_keys({"scale": 1, "growth_factor": 2})
    "['growth_factor', 'scale']"
    """
    ordered = sorted(map(str, keys))
    more = f", and {len(ordered) - MOST_KEYS} more" if len(ordered) > MOST_KEYS else ""
    return f"[{', '.join(map(short, ordered[:MOST_KEYS]))}{more}]"
