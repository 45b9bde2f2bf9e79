"""torch's rule with bounds, as the drop-in for its scaler follows it, and the checks of its numbers."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from gradscale.peers.ladder import Ladder, LadderState
from gradscale.policies.arithmetic import Namespace
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE, check_count, check_number, check_scale
from gradscale.policies.contract import Policy, Seen
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import multiplies

FACTORS = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
"""What torch's scaler saves beside scale and tracker, with its defaults."""

TORCH_DEFAULTS = {"init_scale": 2.0**16, **FACTORS}

RANGES = {
    "growth_factor": (1.0, sys.float_info.max),
    "backoff_factor": (math.ulp(0.0), 1.0),
    "growth_interval": (1, math.inf),
    "scale": (LOWEST_SCALE, HIGHEST_SCALE),
    "_growth_tracker": (0, 2**31 - 1),  # an int32
}
"""Lowest and highest value of the numbers that torch's scaler saves."""

OUT_OF_RANGE = {
    "growth_factor": "`growth_factor` must be finite. {}.",
    "backoff_factor": "`backoff_factor` must be greater than 0, so that the scale stays positive. {}.",
    "growth_interval": "`growth_interval` must be at least 1. {}. For a scale that does not grow, pass one that is "
    "larger than the number of steps.",
    "scale": "A saved scale must lie between 2**-126 and 2**126, where it and its reciprocal are normal float32 "
    "numbers. {}. The run that saved it had lost its scale: put another number into the dict.",
    "_growth_tracker": "`_growth_tracker` must be a count of steps, from 0 to 2**31 - 1. {}.",
}
"""The errors for others."""


@dataclass(frozen=True, slots=True, repr=False)
class TorchRule(Ladder):
    """The rule of torch's scaler, bit for bit what `torch._amp_update_scale_` computes, with bounds.

    It backs off whatever the loss was. A tracker that is past the interval, after that was lowered, grows the scale.
    """

    init_scale: float = TORCH_DEFAULTS["init_scale"]
    overshoot: bool = True
    floor: float = LOWEST_SCALE
    ceiling: float = HIGHEST_SCALE
    refuses_inf: bool = True
    arithmetic: Literal["float32", "float64", "mixed"] = "mixed"

    is_compiled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_scale("min_scale", self.floor)
        check_scale("max_scale", self.ceiling)
        if self.floor > self.ceiling:
            raise ValueError(
                "`min_scale` must not be above `max_scale`. "
                f"Received: min_scale={self.floor!r}, max_scale={self.ceiling!r}."
            )

    def next(self, state: LadderState, seen: Seen, xp: Namespace) -> LadderState:
        """Returns the state after one step."""
        return Ladder.next(self, state, replace(seen, loss_finite=seen.finite), xp)


def rule_of(numbers: dict[str, Any], min_scale: float | None, max_scale: float | None, hysteresis: int) -> Policy:
    """Returns the rule that torch's four numbers and the extra ones give."""
    check_count("hysteresis", hysteresis)
    floor = LOWEST_SCALE if min_scale is None else min_scale
    if hysteresis > 1:
        bound: dict[str, Any] = {} if max_scale is None else {"max_scale": max_scale}
        return Dynamic(**numbers, min_scale=floor, hysteresis=hysteresis, **bound)
    rule = TorchRule(**numbers, floor=floor, ceiling=HIGHEST_SCALE if max_scale is None else max_scale)
    checked_scale("init_scale", rule.init_scale, rule)
    check_numbers({name: numbers[name] for name in FACTORS})
    return rule


def bounds_of(policy: Policy) -> tuple[float, float]:
    """Returns the lowest and the highest scale that other code may set beside `policy`."""
    # By default all that are normal float32 numbers with a normal reciprocal: a device may flush others to zero.
    if isinstance(policy, TorchRule):
        return policy.floor, policy.ceiling
    return (LOWEST_SCALE, HIGHEST_SCALE) if multiplies(policy) else (1.0, 1.0)


def checked_scale(name: str, value: Any, policy: Policy) -> float:
    """Returns a scale as a float, or raises if it is not a number within the bounds."""
    check_number(name, value)
    lowest, highest = bounds_of(policy)
    # Compared as it is, as all numbers are: a Python integer may be too large for a float.
    if not lowest <= value <= highest:
        raise ValueError(
            f"`{name}` must be from {lowest:g} to {highest:g}, the bounds of the scale. "
            f"Received: {name}={shown(value)}."
        )
    return float(value)


def check_numbers(numbers: Mapping[str, Any]) -> None:
    """Raises unless each of torch's numbers that is given is one that can work."""
    for name, value in numbers.items():
        if name != "growth_interval":
            check_number(name, value)
        elif isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r} ({type(value).__name__}).")
    # torch's own errors. The others are not in torch.
    if numbers.get("growth_factor", 2.0) <= 1.0:
        raise AssertionError("The growth factor must be > 1.0.")
    if numbers.get("backoff_factor", 0.5) >= 1.0:
        raise AssertionError("The backoff factor must be < 1.0.")
    if numbers.get("growth_interval", 1) >= 2**63:  # more than torch's kernel takes
        raise ValueError(f"`growth_interval` must be at most 2**63 - 1. Received: {shown(numbers['growth_interval'])}.")
    for name, value in numbers.items():
        (lowest, highest), counts = RANGES[name], name == "_growth_tracker"
        if not lowest <= value <= highest or (counts and not isinstance(value, int)):
            raise ValueError(OUT_OF_RANGE[name].format(f"Received: {name}={shown(value)}"))


def refuse_second_rule(given: dict[str, Any]) -> None:
    """Raises if `policy` is given together with other settings of the scale."""
    defaults = TORCH_DEFAULTS | {"min_scale": None, "max_scale": None, "hysteresis": 1}
    if clashing := [name for name, value in given.items() if value != defaults[name]]:
        raise ValueError(
            "`policy` has all settings of the scale. Received also: "
            f"{', '.join(f'{name}={given[name]!r}' for name in clashing)}. Give these to the policy."
        )


def changed(policy: Policy, name: str, value: Any) -> Policy:
    """Returns `policy` with one of the two factors or the interval set to `value`, or raises if it has none."""
    check_numbers({name: value})
    if isinstance(policy, Dynamic | TorchRule):
        return replace(policy, **{name: value})
    raise ValueError(
        f"The scale follows `{type(policy).__name__}`, which has no `{name}` to set. Received: {name}={value!r}. "
        "Build another scaler with another `policy`."
    )


def shown(value: Any) -> str:
    """Returns a number as text; of a huge integer, which Python may refuse to print, its length."""
    huge = isinstance(value, int) and value.bit_length() > 1024
    return f"an integer of {value.bit_length()} bits" if huge else repr(value)
