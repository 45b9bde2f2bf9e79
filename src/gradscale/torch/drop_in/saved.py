"""The saved form of `GradScaler`: torch's dict, with one more entry for settings that torch's does not have."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from gradscale.engine.saved import read_saved, write_saved
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE
from gradscale.policies.contract import Policy
from gradscale.policies.dynamic import Dynamic
from gradscale.torch.drop_in.settings import Bounds, check_factors, check_interval
from gradscale.torch.step.decide import Rule

EXTRA = "gradscale"
"""Key of the entry that torch's `GradScaler` does not have, and ignores when it loads."""

FACTORS = ("growth_factor", "backoff_factor", "growth_interval")


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved scaler, read and checked.

    Attributes:
        numbers: torch's five entries.
        bounds: the scales that are allowed.
        rule: the policy and its state; None for torch's own rule.
    """

    numbers: dict[str, Any]
    bounds: Bounds
    rule: Rule | None


def write_extra(rule: Rule | None, bounds: Bounds, scale: float, tracker: int) -> dict[str, Any]:
    """Returns the entry beside torch's five, or an empty dict if the five are enough."""
    if rule is not None:
        # torch's tensors are the current ones: users and libraries set the scale, not the rule.
        state = replace(rule.state, scale=np.float32(scale), clean_steps=np.int32(tracker))
        return {EXTRA: write_saved(rule.policy, state)}
    return {} if bounds == Bounds() else {EXTRA: asdict(bounds)}


def read_scaler(saved: Mapping[str, Any], policy: Policy | None, bounds: Bounds) -> Saved:
    """Returns a saved scaler, of this class or of torch's, or raises before anything is changed.

    Saved settings override those of the loading scaler, as in torch; `policy`, where None is torch's own rule, and
    `bounds` are kept where they were not saved.
    """
    numbers = {name: saved[name] for name in ("scale", *FACTORS, "_growth_tracker")}
    _check_scale(numbers["scale"])
    extra = saved.get(EXTRA, {})
    if "policy" in extra:
        saved_rule = read_saved(extra)
        rule, bounds = Rule(saved_rule.policy, saved_rule.state), Bounds()
    else:
        _check_numbers(numbers)
        rule = None if policy is None else Rule(_adapted(policy, numbers))
        bounds = Bounds(**extra) if extra else bounds
    numbers["scale"] = min(max(float(numbers["scale"]), bounds.min_scale), bounds.max_scale)
    return Saved(numbers, bounds, rule)


def _adapted(policy: Policy, numbers: Mapping[str, Any]) -> Policy:
    """Returns `policy` with the numbers that torch saved, if it has them."""
    return replace(policy, **{name: numbers[name] for name in FACTORS}) if isinstance(policy, Dynamic) else policy


def _check_scale(saved: Any) -> None:
    scale = float(saved)
    if not LOWEST_SCALE <= scale <= HIGHEST_SCALE:
        raise ValueError(
            "A saved scale must lie between 2**-126 and 2**126, where it and its reciprocal are normal float32 "
            f"numbers. Received: scale={scale!r}. The run that saved it had lost its scale: put another number into "
            "the dict."
        )


def _check_numbers(numbers: Mapping[str, Any]) -> None:
    if not numbers["growth_factor"] == numbers["backoff_factor"] == 1:
        # Both are 1 in a static scale that was exported to torch, where `check_factors` would reject them.
        check_factors(numbers["growth_factor"], numbers["backoff_factor"])
    check_interval(numbers["growth_interval"])
    tracker = numbers["_growth_tracker"]
    if isinstance(tracker, bool) or not isinstance(tracker, int) or not 0 <= tracker <= np.iinfo(np.int32).max:
        raise ValueError(f"`_growth_tracker` must be a count of steps. Received: _growth_tracker={tracker!r}.")
