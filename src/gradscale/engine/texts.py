"""The text of a scaler, for `repr`: its policy, its scale and its counts, the same on every adapter."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from gradscale._shown import short
from gradscale.formats import Format


def scaler_text(name: str, about: Sequence[str], state: Any, last: Any, shown: Callable[[Any], Any]) -> str:
    """Returns the text of a scaler.

    Args:
        name: its class.
        about: what comes first, such as the text of its policy.
        state: what has its `scale`, `applied` and `skipped`.
        last: the result of the last step; None if there is none.
        shown: returns a number that is in host memory, and the text `<on ...>` for one that is not.
    """
    numbers = [f"{field}={shown(getattr(state, field))}" for field in ("scale", "applied", "skipped")]
    status = [] if last is None else [f"last={last.status_text()}"]
    return f"{name}({', '.join([*about, *numbers, *status])})"


def policy_text(policy: Any) -> str:
    """Returns a policy with the settings that are not the default.

    >>> from gradscale.policies.dynamic import Dynamic
    >>> policy_text(Dynamic(growth_interval=100))
    'Dynamic(growth_interval=100)'
    """
    if not dataclasses.is_dataclass(policy):
        return short(policy)
    names = [field.name for field in dataclasses.fields(policy) if field.init]
    try:
        # As settings are rounded and converted when a policy is made, so are its defaults.
        usual: Any = type(policy)()
    except TypeError:  # a setting has no default
        usual = None
    changed = [name for name in names if usual is None or getattr(policy, name) != getattr(usual, name)]
    return f"{type(policy).__name__}({', '.join(f'{name}={_value(getattr(policy, name))}' for name in changed)})"


def _value(value: Any) -> str:
    return value.name if isinstance(value, Format) else short(value)
