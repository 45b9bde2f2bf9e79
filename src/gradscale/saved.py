"""Policies read back from their dict form, whichever kind they are."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from gradscale.policy import Policy
from gradscale.record import Record


def policy_from_dict(mapping: Mapping[str, Any]) -> Policy:
    """Returns the policy that `to_dict` wrote, of whichever kind it says it is.

    >>> from gradscale.policy import Static
    >>> policy_from_dict(Static(1024.0).to_dict())
    Static(scale=1024.0)

    Raises:
        TypeError: `mapping` is not a mapping, or a value has the wrong type.
        ValueError: the kind is missing or unknown, or the dict is not as `to_dict` wrote it.
    """
    if not isinstance(mapping, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"A saved policy is a mapping. Received: {type(mapping).__name__}.")
    kinds = {kind.__name__: kind for kind in _policies(Record)}
    wanted = mapping.get("kind")
    if wanted not in kinds:
        raise ValueError(f"A saved policy says its kind. Received: kind={wanted!r}. Known: {', '.join(sorted(kinds))}.")
    return kinds[wanted].from_dict(mapping)  # pyright: ignore[reportReturnType]


def _policies(base: type[Record]) -> Iterator[type[Record]]:
    """Yields every loaded policy class below `base`."""
    for kind in base.__subclasses__():
        # `dataclass(slots=True)` makes a second class and leaves the first one behind.
        is_final = getattr(sys.modules[kind.__module__], kind.__name__, None) is kind
        if is_final and hasattr(kind, "next"):
            yield kind
        yield from _policies(kind)
