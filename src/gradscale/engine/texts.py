"""The text of a scaler, for `repr`: its policy, its scale and its counts, the same on every adapter."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from gradscale._shown import short
from gradscale._text import number_text, settings_text


def scaler_text(name: str, about: Sequence[str], state: Any, last: Any, shown: Callable[[Any], Any]) -> str:
    """Returns the text of a scaler.

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


def policy_text(policy: Any) -> str:
    """Returns a policy with the settings that are not the default; one that is no dataclass as it is, cut short."""
    return settings_text(policy) if dataclasses.is_dataclass(policy) else short(policy)
