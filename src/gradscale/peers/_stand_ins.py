"""What stands for the objects of a pickle: they hold attributes, or nothing, and none of the objects' behavior."""

from collections.abc import Callable
from typing import Any, NoReturn


class Unread:
    """A tensor, a storage or another part of a checkpoint that the scaler does not need."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<not read; load the file with `torch.load(path, weights_only=True)` to get tensors>"


UNREAD = Unread()
"""The only one, as all are alike and a checkpoint has thousands."""


class StandIn:
    """A scaler: its attributes."""

    __slots__ = ("attributes",)

    def __init__(self) -> None:
        self.attributes: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<a pickled scaler with {len(self.attributes)} attributes>"


Made = StandIn | Unread | dict[str, Any]
"""What a call in a pickle makes."""


class Global:
    """A name in a pickle, which a later instruction may call: `make` is what the call makes."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Made]) -> None:
        self.make = make

    def __repr__(self) -> str:
        return repr(UNREAD)


def damaged(reason: str) -> NoReturn:
    """Raises the error of a file that is not what it should be."""
    raise ValueError(
        "The bytes must be a pickle, or a file that `torch.save` wrote. "
        f"Received: something that cannot be read ({reason})."
    )
