"""A policy and its state as one plain dict: all it takes to go on bit for bit."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np

from gradscale.policies.contract import Policy, ScaleState, check_policy
from gradscale.record import Record, numbers

KEYS = ("policy", "state")


def write_saved(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns the policy and its state as plain values that go through JSON. Waits for the device."""
    return {"policy": policy.to_dict(), "state": state.to_dict()}


def read_saved(mapping: Mapping[str, Any]) -> tuple[Policy, ScaleState]:
    """Returns the policy and the state that `write_saved` wrote.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a key is missing or unknown, or a value is out of range.
    """
    _check_parts(mapping)
    policy = policy_from_dict(mapping["policy"])
    check_policy(policy)
    state = cast(type[ScaleState], type(policy.start())).from_dict(mapping["state"])
    check_state(policy, state)
    low, high = getattr(policy, "min_scale", 0.0), getattr(policy, "max_scale", np.inf)
    if not low <= state.scale <= high:
        raise ValueError(
            f"The saved scale must lie between the policy's bounds, {low!r} and {high!r}. "
            f"Received: scale={float(state.scale)!r}. The file it came from is damaged."
        )
    return policy, state


def check_state(policy: Policy, state: Any) -> None:
    """Raises if `state` is not a state of `policy`, for a single scale."""
    kind = cast(type[ScaleState], type(policy.start()))
    if not isinstance(state, kind):
        raise TypeError(
            f"`state` must be a {kind.__name__}, as `policy.start()` returns. "
            f"Received: {type(state).__name__}. Another system's state comes with its policy from `import_state`."
        )
    if many := sorted(name for name, value in numbers(state).items() if np.ndim(value)):
        raise ValueError(f"`state` must hold one scale, not a vector of them. Received: vectors in {many}.")


def _check_parts(mapping: Any) -> None:
    """Raises if `mapping` does not have the two parts that `write_saved` writes."""
    if not isinstance(mapping, Mapping):
        raise TypeError(f"`load_state_dict` takes what `state_dict` returned. Received: {type(mapping).__name__}.")
    saved = cast(Mapping[Any, Any], mapping)
    if set(saved) != set(KEYS):
        raise ValueError(
            f"A saved LossScaler has the keys {list(KEYS)}. Received: {sorted(map(str, saved))}. "
            "Another system's state is read by `gradscale.import_state`."
        )
    for key, part in saved.items():
        if not isinstance(part, Mapping):
            raise TypeError(f"`{key}` of a saved LossScaler must be a mapping. Received: {part!r}.")


def policy_from_dict(mapping: Mapping[str, Any]) -> Policy:
    """Returns the policy that `to_dict` wrote, of whichever kind it says it is.

    >>> from gradscale.policies.static import Static
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
    if not isinstance(wanted, str) or wanted not in kinds:
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
