"""The nearest known name, for error messages about a name that is not known."""

import difflib
from collections.abc import Iterable


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
