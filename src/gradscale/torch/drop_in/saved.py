"""The saved form of `GradScaler`: torch's dict, with one more entry for settings that torch's does not have."""

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from gradscale.engine.saved import read_saved, write_saved
from gradscale.engine.saved_text import KEY, read_text, write_text
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE, check_number
from gradscale.policies.contract import Policy
from gradscale.policies.dynamic import Dynamic
from gradscale.torch.drop_in.counters import Counters
from gradscale.torch.drop_in.retry import Leaves
from gradscale.torch.drop_in.scale_bound import ScaleBound
from gradscale.torch.drop_in.settings import Bounds, bounds_of, check_factors, check_interval, shown
from gradscale.torch.drop_in.steps import Steps
from gradscale.torch.drop_in.update import LARGEST_TRACKER
from gradscale.torch.step.decide import Rule

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

    @property
    def policy(self) -> Policy | None:
        """The policy; None for torch's own rule."""
        return None if self.rule is None else self.rule.policy

    def counters(self) -> Counters:
        """Returns the steps counted so far: those of the policy's state. torch saves none."""
        scale = self.numbers["scale"]
        if self.rule is None:
            return Counters(scale)
        state = self.rule.state
        return Counters(scale, int(state.applied), int(state.skipped), int(state.consecutive_skips))


def write_extra(rule: Rule | None, bounds: Bounds, scale: float, tracker: int) -> dict[str, str]:
    """Returns the entry beside torch's five, which torch ignores when it loads, or an empty dict if these suffice."""
    if rule is not None:
        # torch's tensors are the current ones: users and libraries set the scale, not the rule.
        state = replace(rule.state, scale=np.float32(scale), clean_steps=np.int32(tracker))
        return {KEY: write_text(write_saved(rule.policy, state, float(rule.amax_ratio)))}
    return {} if bounds == Bounds() else {KEY: write_text(asdict(bounds))}


def read_scaler(saved: Mapping[str, Any], policy: Policy | None, bounds: Bounds) -> Saved:
    """Returns a saved scaler, of this class or of torch's, or raises before anything is changed.

    Saved settings override those of the loading scaler, as in torch; `policy`, where None is torch's own rule, and
    `bounds` are kept where neither was saved.

    Raises:
        KeyError: one of torch's five entries is missing.
        TypeError: a value has the wrong type.
        ValueError: a value is out of range, or the entry of this class is not as `write_extra` wrote it.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(f"`load_state_dict` takes what `state_dict` returned. Received: {type(saved).__name__}.")
    numbers = {name: _number(name, saved) for name in ("scale", *FACTORS, "_growth_tracker")}
    _check_scale(numbers["scale"])
    extra = _extra(saved)
    # The rules of some systems count from -1.
    _check_numbers(numbers, lowest=-1 if "policy" in extra else 0)
    if "policy" in extra:
        saved_rule = read_saved(extra)
        rule = Rule(saved_rule.policy, saved_rule.state, amax_ratio=saved_rule.amax_ratio)
        bounds = bounds_of(saved_rule.policy)
    elif extra:
        rule, bounds = None, Bounds(**extra)
    else:
        rule = None if policy is None else Rule(_adapted(policy, numbers))
    numbers["scale"] = min(max(float(numbers["scale"]), bounds.min_scale), bounds.max_scale)
    return Saved(numbers, bounds, rule)


def contents_of_copy(rule: Rule | None, steps: Steps) -> dict[str, Any]:
    """Returns the attributes that a pickle or a copy of the scaler has instead of the scaler's own."""
    # Results, bounds and divided optimizers refer to tensors of the original. torch's `__getstate__` raises unless its
    # states are empty: they are new ones here, so that a shallow copy does not share them.
    contents = {
        "last": None,
        "_bound": ScaleBound(),
        "_divided": [],
        "_leaves": Leaves(),
        "_steps": copy.copy(steps),
        "_updated": None,
        "_per_optimizer_states": defaultdict(_refresh_per_optimizer_state),
    }
    if rule is not None:
        state = type(rule.state).from_dict(rule.state.to_dict())
        contents["_rule"] = Rule(rule.policy, state, amax_ratio=float(rule.amax_ratio))
    return contents


def _number(name: str, saved: Mapping[str, Any]) -> Any:
    """Returns one of torch's five entries as a Python number; raises if it is missing or no number."""
    if name not in saved:
        error = KeyError(name)
        error.add_note(
            f"A saved GradScaler has the entries scale, {', '.join(FACTORS)} and _growth_tracker. "
            f"Received: {sorted(map(str, saved))[:10]}. Another system's state is read by `gradscale.import_state`."
        )
        raise error
    value: Any = saved[name]
    number: Any = value.item() if isinstance(value, Tensor | np.generic) and value.ndim == 0 else value
    check_number(name, number)
    return number


def _extra(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entry of this class, or an empty dict; raises unless it holds a policy or bounds."""
    extra = read_text(saved.get(KEY, {}))
    if not isinstance(extra, Mapping):
        raise TypeError(f"`{KEY}` of a saved GradScaler must hold a mapping. Received: {type(extra).__name__}.")
    known = {field.name for field in fields(Bounds)}
    if extra and "policy" not in extra and set(extra) != known:
        raise ValueError(
            f"`{KEY}` of a saved GradScaler holds a policy and its state, or {' and '.join(sorted(known))}. "
            f"Received the keys: {sorted(map(str, extra))[:10]}."
        )
    return dict(extra)


def _adapted(policy: Policy, numbers: Mapping[str, Any]) -> Policy:
    """Returns `policy` with the numbers that torch saved, if it has them."""
    return replace(policy, **{name: numbers[name] for name in FACTORS}) if isinstance(policy, Dynamic) else policy


def _check_scale(scale: Any) -> None:
    # Compared as it is: a Python integer may be too large for a float.
    if not LOWEST_SCALE <= scale <= HIGHEST_SCALE:
        raise ValueError(
            "A saved scale must lie between 2**-126 and 2**126, where it and its reciprocal are normal float32 "
            f"numbers. Received: scale={shown(scale)}. The run that saved it had lost its scale: put another number "
            "into the dict."
        )


def _check_numbers(numbers: Mapping[str, Any], lowest: int) -> None:
    if not numbers["growth_factor"] == numbers["backoff_factor"] == 1:
        # Both are 1 in a static scale that was exported to torch, where `check_factors` would reject them.
        check_factors(numbers["growth_factor"], numbers["backoff_factor"])
    check_interval(numbers["growth_interval"])
    tracker = numbers["_growth_tracker"]
    if not isinstance(tracker, int) or not lowest <= tracker <= LARGEST_TRACKER:
        raise ValueError(
            "`_growth_tracker` must be a count of steps, from 0 to 2**31 - 1. "
            f"Received: _growth_tracker={shown(tracker)}."
        )
