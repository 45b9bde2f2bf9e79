"""Writing a state for another system, once that system is known to be able to follow its policy."""

import math
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from gradscale.peers._saved import Saved
from gradscale.peers.ladder import Ladder
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.dynamic import Dynamic

COMMON_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
"""Fields of a ladder that most systems have a setting for."""

_NAMES = {
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
    "late": "uncounted clean steps",
    "hysteresis": "hysteresis",
    "refill": "refill",
    "floor": "min_scale",
    "ceiling": "max_scale",
}
"""What two ladders must share to change a scale the same way, except at the ends of the number range."""


def ladder_for(system: str, policy: Policy, rule: Ladder, settings: Collection[str]) -> Ladder:
    """Returns `policy` as a ladder; raises unless `system` can follow it.

    `rule` is a ladder that the system follows, with the values it has no setting for. `settings` are the fields of a
    ladder that it has a setting for.

    Raises:
        TypeError: `policy` does not grow and back off by steps.
        ValueError: `policy` does something that `system` cannot.
    """
    ladder = _as_ladder(system, policy, rule, settings)
    theirs, ours = _facts(rule), _facts(ladder)
    for field, name in _NAMES.items():
        if field not in settings and ours[field] != theirs[field]:
            raise ValueError(
                f"{system} has {name}={theirs[field]!r} and no setting for it. Received: {name}={ours[field]!r}. "
                "Export a policy with that value (see `dataclasses.replace`): the scale will then change differently."
            )
    return ladder


def values_of(state: ScaleState) -> Saved:
    """Returns the leaves of a state, each of which must be a single number. Synchronizes with their device."""
    return Saved("the state to export", {field.name: getattr(state, field.name) for field in fields(state)})


def _as_ladder(system: str, policy: Policy, rule: Ladder, settings: Collection[str]) -> Ladder:
    if isinstance(policy, Ladder):
        return policy
    if not isinstance(policy, Dynamic):
        raise TypeError(
            f"{system} can continue from `Dynamic` or from a preset that grows and backs off by steps. "
            f"Received: {type(policy).__name__}."
        )
    # Default bounds are replaced by the system's own, or by none. Bounds that the user chose are not dropped.
    default = Dynamic()
    own_floor = policy.min_scale == default.min_scale and "floor" not in settings
    own_ceiling = policy.max_scale == default.max_scale and "ceiling" not in settings
    return Ladder(
        init_scale=policy.init_scale,
        growth_factor=policy.growth_factor,
        backoff_factor=policy.backoff_factor,
        growth_interval=policy.growth_interval,
        hysteresis=policy.hysteresis,
        refill=policy.refill,
        floor=rule.floor if own_floor else policy.min_scale,
        ceiling=rule.ceiling if own_ceiling else policy.max_scale,
    )


def _facts(ladder: Ladder) -> dict[str, Any]:
    """Returns what determines the scales of the ladder."""
    # Without hysteresis there is nothing to refill, so rules that differ in `refill` alone are the same.
    facts = {field: getattr(ladder, field) for field in _NAMES}
    facts["backoff_factor"] = ladder.backoff
    facts["refill"] = ladder.refill if ladder.hysteresis > 1 else "growth"
    return facts


def shared_factor(system: str, ladder: Ladder) -> float:
    """Returns the factor by which `ladder` both grows and backs off.

    Raises:
        ValueError: it backs off by another factor than it grows by.
    """
    growth, backoff = float(ladder.growth_factor), ladder.backoff
    if not math.isclose(growth * backoff, 1, rel_tol=2.0**-23):  # either may have been rounded to float32
        raise ValueError(
            f"{system} grows and backs off by one factor. "
            f"Received: growth_factor={growth!r}, backoff_factor={backoff!r}."
        )
    return growth
