"""Values as text, for `repr` and messages: no longer than what a user would write, whatever a file holds."""

import difflib
import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

MOST_KEYS = 20
"""Keys that a message lists. The longest list that a system saves, Paddle's, has 8."""

LONGEST = 7
"""Characters of a power of two that is written in decimals, such as 65536.0 and 0.03125."""


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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?` with the known name that is most like `name`, or nothing where none is.

    >>> did_you_mean("dynamc", ["dynamic", "static"])
    " Did you mean 'dynamic'?"
    >>> did_you_mean("xyz", ["dynamic", "static"])
    ''
    """
    # Compared without case, and cut: the name may come from a file or a program.
    by_lower = {each.lower(): each for each in known}
    nearest = difflib.get_close_matches(name.lower()[:80], by_lower, n=1)
    return f" Did you mean {by_lower[nearest[0]]!r}?" if nearest else ""


def number_text(value: Any) -> str:
    """Returns a number as a user would write it: long powers of two as powers, float32 numbers without their tail.

    A string, which stands for a number that is not in host memory, is returned as it is; other values are cut short.

    >>> number_text(2.0**-24), number_text(1024.0), number_text(float(np.float32(0.002)))
    ('2**-24', '1024.0', '0.002')
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, float) or not math.isfinite(value):
        return short(value)
    text = repr(float(value))
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and len(text) > LONGEST:
        return f"2**{exponent - 1}"
    # Settings are rounded to float32, and Python shows all digits of the rounded one.
    single = str(np.float32(value)) if abs(value) <= np.finfo(np.float32).max else text
    return single if float(np.float32(single)) == value and len(single) < len(text) else text


def scaler_text(name: str, about: Sequence[str], state: Any, last: Any, shown: Callable[[Any], Any]) -> str:
    """Returns the text of a scaler, for its `repr`: the same on every adapter.

    Args:
        name: its class.
        about: what comes first, such as the text of its policy.
        state: what has its `scale`, `applied` and `skipped`.
        last: the result of the last step; None if there is none.
        shown: returns a number that is in host memory, and the text `<on ...>` for one that is not.
    """
    numbers = [f"{field}={number_text(shown(getattr(state, field)))}" for field in ("scale", "applied", "skipped")]
    status = [] if last is None else [f"last={last.status_text()}"]
    return f"{name}({', '.join([*about, *numbers, *status])})"
