"""A policy and its state as a plain dict, as one text or in a file: all it takes to continue bit-exactly."""

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from gradscale._text import short, shown, shown_keys
from gradscale.engine.measurement import UNKNOWN_RATIO
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE, check_number
from gradscale.policies.contract import Policy, ScaleState, check_policy
from gradscale.policies.static import CheckOnly
from gradscale.record import Record, numbers, settings_text, with_values

logger = logging.getLogger(__name__)

KEY = "gradscale"
"""Key of the text, in the dict of a scaler, so that it is one value of a checkpoint whatever the policy."""

KEYS = ("policy", "state")

AMAX_RATIO = "amax_ratio"
"""Key of the last ratio of amax to norm, which is written where amax is estimated between two reads."""

LARGEST_FILE = 2**20
"""Bytes of the largest file. A policy and its state take less than two thousand."""

REPLACED = (
    "The saved policy replaces the one that the scaler was built with: %s, not %s. To continue with another "
    "policy, do not load the scaler's state. This is logged once."
)
KEPT = (
    "The saved state of the scaler is not loaded: it is one of %s, and the scaler was built with %s. One of the two "
    "scales, and the other only checks, as for BF16: the run goes on in another format. This is logged once."
)

_noted: set[tuple[str, ...]] = set()


class Saved(NamedTuple):
    """A saved scaler, read and checked.

    Attributes:
        policy: the rule.
        state: its state.
        amax_ratio: last ratio of amax to norm.
    """

    policy: Policy
    state: ScaleState
    amax_ratio: float = UNKNOWN_RATIO


def write_saved(policy: Policy, state: ScaleState, amax_ratio: float = UNKNOWN_RATIO) -> dict[str, Any]:
    """Returns the policy and its state as plain values that go through JSON. Synchronizes with the device."""
    estimated = {} if amax_ratio == UNKNOWN_RATIO else {AMAX_RATIO: amax_ratio}
    return {"policy": policy.to_dict(), "state": state.to_dict(), **estimated}


def read_saved(
    mapping: Mapping[str, Any], kind: str = "LossScaler", read: str = "load_state_dict", write: str = "state_dict"
) -> Saved:
    """Returns what `write_saved` wrote, as it is or as the one text that PyTorch's scaler makes of it.

    Errors name the class of the scaler, and its methods that read and write.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a key is missing or unknown, or a value is out of range.
    """
    mapping = opened(mapping)
    _check_parts(mapping, kind, read, write)
    policy = policy_from_dict(mapping["policy"])
    check_policy(policy)
    # The class of the state comes from the policy, not from the file: a state of another policy is refused.
    start: ScaleState = policy.start()
    state = type(start).from_dict(mapping["state"])
    # Leaves in float64 where those of the start are: a dict does not say in which type.
    wide = [name for name, value in numbers(start).items() if value.dtype == np.float64]
    state = with_values(state, {name: np.float64(getattr(state, name)) for name in wide})
    _check_kind(policy, state)
    low, high = getattr(policy, "min_scale", 0.0), getattr(policy, "max_scale", np.inf)
    if not low <= state.scale <= high:
        raise ValueError(
            f"The saved scale must lie between the policy's bounds, {low!r} and {high!r}. "
            f"Received: scale={float(state.scale)!r}. The file it came from is damaged."
        )
    check_state(policy, state)
    ratio = mapping.get(AMAX_RATIO, UNKNOWN_RATIO)
    check_number(AMAX_RATIO, ratio)
    if not 0 < ratio <= 1:
        raise ValueError(f"`{AMAX_RATIO}` must be above 0 and at most 1. Received: {AMAX_RATIO}={short(ratio)}.")
    return Saved(policy, state, float(ratio))


def write_text(saved: Mapping[str, Any]) -> str:
    """Returns plain values as JSON.

    `torch.distributed.checkpoint` flattens nested dicts and loads only the keys that the loading scaler has, which are
    those of its own policy: another policy would be refused, or lost. A text is neither flattened nor merged.
    """
    return json.dumps(saved, allow_nan=False)


def read_text(value: Any) -> Any:
    """Returns the values of a text that `write_text` wrote, and anything but a text as it is.

    Raises:
        ValueError: the text is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{KEY}` of a saved scaler is JSON. Received: {short(value)}.") from error


def opened(mapping: Any) -> Any:
    """Returns the values in a dict whose only entry is a text, and anything else as it is."""
    if isinstance(mapping, Mapping) and set(cast(Mapping[Any, Any], mapping)) == {KEY}:
        return read_text(mapping[KEY])
    return mapping  # pyright: ignore[reportUnknownVariableType]


def read_file(path: str | Path) -> Saved:
    """Returns what `write_saved` made, from a JSON file, which is not trusted.

    Raises:
        OSError: the file cannot be read.
        ValueError: it does not hold a saved scaler.
    """
    with open(path, "rb") as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise ValueError(f"A saved LossScaler takes at most {LARGEST_FILE} bytes. Received: {path}, which is larger.")
    try:
        mapping = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`path` must name a JSON file that `save` wrote. Received: {path} ({error}).") from error
    try:
        return read_saved(mapping)
    except TypeError as error:  # `path` has the right type, so what is in the file is a matter of value
        raise ValueError(str(error)) from error


def replaces_policy(present: Policy | None, saved: Policy | None) -> bool:
    """Returns whether a load replaces the policy by the saved one. None is torch's own rule.

    Not where one of the two is `CheckOnly` and the other is not: a run in FP16 that is resumed from one in BF16 would
    be trained without a scale. `note_policy` logs it.
    """
    return isinstance(present, CheckOnly) == isinstance(saved, CheckOnly)


def note_policy(present: Policy | None, saved: Policy | None) -> None:
    """Logs what a load does with a saved policy that is another one: once per process for each such pair."""
    pair = tuple("torch's own rule" if policy is None else settings_text(policy) for policy in (saved, present))
    if present != saved and pair not in _noted:
        _noted.add(pair)
        logger.warning(REPLACED if replaces_policy(present, saved) else KEPT, *pair)


def check_state(policy: Policy, state: Any) -> None:
    """Raises if `state` is not a state of `policy`, for a single scale that gradients can be divided by."""
    _check_kind(policy, state)
    if isinstance(policy, CheckOnly) and state.scale != 1:
        raise ValueError(
            f"The scale of `CheckOnly` is 1, and nothing is multiplied by it. Received: scale={float(state.scale)!r}. "
            "Continue with the policy that made this state, or start `CheckOnly` without it."
        )
    if policy.needs and not LOWEST_SCALE <= state.scale <= HIGHEST_SCALE:
        raise ValueError(
            "The scale of a run must lie between 2**-126 and 2**126, where it and its reciprocal are normal float32 "
            f"numbers. Received: scale={float(state.scale)!r}. A run that gets there has lost its scale: put another "
            "in its place, such as 65536."
        )


def _check_kind(policy: Policy, state: Any) -> None:
    """Raises if `state` is not a state of `policy`, or holds more than one scale."""
    kind = cast(type[ScaleState], type(policy.start()))
    if not isinstance(state, kind):
        raise TypeError(
            f"`state` must be a {kind.__name__}, as `policy.start()` returns. "
            f"Received: {type(state).__name__}. Another system's state comes with its policy from `import_state`."
        )
    if many := sorted(name for name, value in numbers(state).items() if np.ndim(value)):
        raise ValueError(f"`state` must hold one scale, not a vector of them. Received: vectors in {many}.")


def _check_parts(mapping: Any, kind: str, read: str, write: str) -> None:
    """Raises if `mapping` does not have the two parts that `write_saved` writes."""
    if not isinstance(mapping, Mapping):
        raise TypeError(f"`{read}` takes what `{write}` returned. Received: {type(mapping).__name__}.")
    saved = cast(Mapping[Any, Any], mapping)
    if set(saved) - {AMAX_RATIO} != set(KEYS):
        other = f"`{read}(saved, system=...)` where it is taken, or " if read == "load_state_dict" else ""
        raise ValueError(
            f"A saved {kind} has the keys {list(KEYS)}. Received: {shown_keys(saved)}. "
            f"For another system's state use {other}`gradscale.import_state`."
        )
    for key in KEYS:
        if not isinstance(part := saved[key], Mapping):
            raise TypeError(f"`{key}` of a saved {kind} must be a mapping. Received: {shown(part)}.")


def policy_from_dict(mapping: Mapping[str, Any]) -> Policy:
    """Returns the policy that `to_dict` wrote, of the class that its `kind` names.

    >>> from gradscale.policies.static import Static
    >>> policy_from_dict(Static(1024.0).to_dict())
    Static(scale=1024.0)

    Raises:
        TypeError: `mapping` is not a mapping, or a value has the wrong type.
        ValueError: the kind is missing or unknown, or the dict is not as `to_dict` wrote it.
    """
    if not isinstance(mapping, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"A saved policy is a mapping. Received: {type(mapping).__name__}.")
    # Among loaded classes only: a file cannot have a module imported.
    kinds = {kind.__name__: kind for kind in _policies(Record)}
    wanted = mapping.get("kind")
    if not isinstance(wanted, str) or wanted not in kinds:
        raise ValueError(
            f"A saved policy has a `kind`. Received: kind={short(wanted)}. Known: {', '.join(sorted(kinds))}."
        )
    return kinds[wanted].from_dict(mapping)  # pyright: ignore[reportReturnType]


def _policies(base: type[Record]) -> Iterator[type[Record]]:
    """Yields every loaded policy class below `base`."""
    for kind in base.__subclasses__():
        # `dataclass(slots=True)` makes a second class, and the first stays in `__subclasses__` until it is collected.
        is_final = getattr(sys.modules[kind.__module__], kind.__name__, None) is kind
        if is_final and hasattr(kind, "next"):
            yield kind
        yield from _policies(kind)
