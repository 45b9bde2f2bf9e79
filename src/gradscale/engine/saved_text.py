"""A saved scaler as one text, so that it is one value of a checkpoint, under the same key whatever the policy."""

import json
import logging
from collections.abc import Mapping
from typing import Any, cast

from gradscale._shown import short
from gradscale.engine.texts import policy_text
from gradscale.policies.contract import Policy
from gradscale.policies.static import CheckOnly

logger = logging.getLogger(__name__)

KEY = "gradscale"
"""Key of the text, in the dict of a scaler."""

_noted: set[tuple[str, ...]] = set()


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


REPLACED = (
    "The saved policy replaces the one that the scaler was built with: %s, not %s. To continue with another "
    "policy, do not load the scaler's state. This is logged once."
)
KEPT = (
    "The saved state of the scaler is not loaded: it is one of %s, and the scaler was built with %s. One of the two "
    "scales, and the other only checks, as for BF16: the run goes on in another format. This is logged once."
)


def replaces_policy(present: Policy | None, saved: Policy | None) -> bool:
    """Returns whether a load replaces the policy by the saved one. None is torch's own rule.

    Not where one of the two is `CheckOnly` and the other is not: a run in FP16 that is resumed from one in BF16 would
    be trained without a scale. `note_policy` logs it.
    """
    return isinstance(present, CheckOnly) == isinstance(saved, CheckOnly)


def note_policy(present: Policy | None, saved: Policy | None) -> None:
    """Logs what a load does with a saved policy that is another one: once per process for each such pair."""
    pair = tuple("torch's own rule" if policy is None else policy_text(policy) for policy in (saved, present))
    if present != saved and pair not in _noted:
        _noted.add(pair)
        logger.warning(REPLACED if replaces_policy(present, saved) else KEPT, *pair)
