"""How a system saves a rule that grows and backs off by steps: which of its keys is which number."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

from gradscale._text import short
from gradscale.peers._saved import Imported, Saved, picked, started
from gradscale.peers.ladder import NO_LIMIT, Ladder, one_factor_ladder
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import Static

COMMON_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
"""Fields of a ladder that most systems have a setting for."""

FACTOR = "factor"
"""Stands for the two factors of a ladder where a system grows and backs off by one."""

_COUNTS = ("growth_interval", "hysteresis")

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


@dataclass(frozen=True, slots=True)
class Form:
    """The keys of a system.

    Attributes:
        what: whose they are, for messages: "torch's GradScaler".
        rule: returns the system's rule; it takes the keys of `settings`, or none, as keywords.
        scale: the key of the scale.
        clean_steps: the key of the clean steps.
        settings: the field of a ladder, or `FACTOR`, for each key that may be saved with them.
        credits: the key of the credits, if they are saved.
        wraps: whether a counter of clean steps that is past the interval wraps round without growth.
    """

    what: str
    rule: Callable[..., Any]
    scale: str
    clean_steps: str
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    credits: str = ""
    wraps: bool = False

    def read(self, mapping: Mapping[str, Any]) -> Imported:
        """Returns the policy of the settings that were saved, and the state."""
        required = filter(None, (self.scale, self.clean_steps, self.credits))
        saved = picked(self.what, mapping, tuple(required), tuple(self.settings))
        counts = {key for key, name in self.settings.items() if name in _COUNTS}
        given = [key for key in self.settings if key in saved.values]
        rule = self.rule(**{key: saved.count(key) if key in counts else saved.number(key) for key in given})
        scale = saved.scale(self.scale) if rule.arithmetic == "float64" else saved.scale32(self.scale)
        clean_steps = saved.count(self.clean_steps)
        if self.wraps:
            clean_steps = wrapped(clean_steps, rule.growth_interval)
        credits = saved.count(self.credits, lowest=NO_LIMIT) if self.credits else rule.hysteresis
        if "init_scale" not in self.settings.values():
            rule = replace(rule, init_scale=float(scale))
        return started(rule, scale=scale, clean_steps=clean_steps, credits=credits)

    def write(self, policy: Policy, state: ScaleState, given_again: Collection[str] = ()) -> dict[str, Any]:
        """Returns the keys, for a policy that the system can follow.

        `given_again` are the fields of a ladder that it has settings for, but does not save.
        """
        names = [COMMON_SETTINGS[:2] if name == FACTOR else (name,) for name in self.settings.values()]
        ladder = ladder_for(self.what, policy, self.rule(), [*chain(*names), *given_again])
        values = values_of(state)
        clean_steps = values.count("clean_steps", lowest=-int(self.wraps))
        next_wraps = 2 * int(ladder.growth_interval) - 1
        written = {
            self.scale: values.scale("scale"),
            self.clean_steps: clean_steps if clean_steps >= 0 else next_wraps,
        }
        if self.credits:
            written[self.credits] = values.count("credits", lowest=NO_LIMIT)
        return written | {key: self._setting(ladder, name) for key, name in self.settings.items()}

    def _setting(self, ladder: Ladder, name: str) -> float:
        if name == FACTOR:
            return shared_factor(self.what, ladder)
        value = ladder.backoff if name == "backoff_factor" else getattr(ladder, name)
        return int(value) if name in _COUNTS else float(value)


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
    for fact, name in _NAMES.items():
        if fact not in settings and ours[fact] != theirs[fact]:
            raise ValueError(
                f"{system} has {name}={theirs[fact]!r} and no setting for it. Received: {name}={ours[fact]!r}. "
                "Export a policy with that value (see `dataclasses.replace`): the scale will then change differently."
            )
    return ladder


def wrapped(counter: int, period: int) -> int:
    """Returns the clean steps that a counter stands for, where it grows at `period - 1` and then is taken modulo it."""
    return counter if counter < period else (counter + 1) % period - 1


def values_of(state: ScaleState) -> Saved:
    """Returns the leaves of a state, each of which must be a single number. Synchronizes with their device."""
    return Saved("the state to export", {leaf.name: getattr(state, leaf.name) for leaf in fields(state)})


def _as_ladder(system: str, policy: Policy, rule: Ladder, settings: Collection[str]) -> Ladder:
    if isinstance(policy, Ladder):
        return policy
    if not isinstance(policy, Dynamic):
        raise TypeError(
            f"{system} can continue from `Dynamic` or from a preset that grows and backs off by steps. "
            f"Received: {type(policy).__name__}."
        )
    # Default bounds are replaced by the system's own, or by none. Bounds that the user chose are not dropped.
    names = {each.name for each in fields(Ladder)} & {each.name for each in fields(policy)}
    shared = {name: getattr(policy, name) for name in names}
    own_floor = policy.min_scale == Dynamic().min_scale and "floor" not in settings
    own_ceiling = policy.max_scale == Dynamic().max_scale and "ceiling" not in settings
    floor = rule.floor if own_floor else policy.min_scale
    return Ladder(**shared, floor=floor, ceiling=rule.ceiling if own_ceiling else policy.max_scale)


def _facts(ladder: Ladder) -> dict[str, Any]:
    """Returns what determines the scales of the ladder."""
    # Without hysteresis there is nothing to refill, so rules that differ in `refill` alone are the same.
    facts = {name: getattr(ladder, name) for name in _NAMES}
    return facts | {"backoff_factor": ladder.backoff, "refill": ladder.refill if ladder.hysteresis > 1 else "growth"}


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


# Some scalers count all iterations and remember the last overflow, instead of counting clean steps, and grow when
# `(cur_iter - last_overflow_iter) % scale_window` is 0. apex's contrib optimizer and DeepSpeed's save these counters in
# the same way; DeepSpeed begins to count one clean step later.


def modulo_rule(init_scale: float, scale_factor: float, scale_window: int, floor: float, **settings: Any) -> Ladder:
    """Returns the rule in Python floats: times `scale_factor` to grow, divided by it to back off, down to `floor`."""
    return one_factor_ladder(init_scale, scale_factor, scale_window, floor=floor, arithmetic="float64", **settings)


def read_iterations(saved: Saved, floor: float, late: int = 0, credits: int = 1, **settings: Any) -> Imported:
    """Returns the rule and the state of `cur_scale`, `cur_iter` and, if the scale is dynamic, the other keys."""
    scale = saved.scale("cur_scale")
    if not saved.flag("dynamic_loss_scale"):
        return started(Static(scale))
    factor, window = saved.factor("scale_factor"), saved.count("scale_window", lowest=1)
    # `cur_iter` is increased after the update, so an overflow in the last step gives a difference of 1, not 0.
    counted = steps_between(saved, "last_overflow_iter", "cur_iter", lowest=-1) - 1 - late
    rule = modulo_rule(scale, factor, window, floor, late=late, **settings)
    return started(rule, clean_steps=counted % window if counted >= 0 else counted, credits=credits)


def steps_between(saved: Saved, first: str, then: str, lowest: int = 0, fewest: int = 1) -> int:
    """Returns the steps from one counter to another; raises unless there are at least `fewest`."""
    steps = saved.count(then) - saved.count(first, lowest=lowest)
    if steps < fewest:
        raise ValueError(
            f"`{first}` of {saved.what} must {'come before' if fewest else 'not come after'} `{then}`. Received: "
            f"{first}={short(saved.values[first])}, {then}={short(saved.values[then])}."
        )
    return steps


def steps_so_far(values: Saved, since_overflow: int) -> int:
    """Returns the steps of a state. An imported one counts none before the import, but its clean steps."""
    return max(values.count("applied") + values.count("skipped"), since_overflow)


def write_iterations(
    system: str, policy: Policy, state: ScaleState, rule: Ladder, given_again: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns the keys of a scaler that counts iterations, for a policy that it can follow."""
    values = values_of(state)
    scale = {"dynamic_loss_scale": not isinstance(policy, Static), "cur_scale": values.scale("scale")}
    if isinstance(policy, Static):
        return scale | {"cur_iter": steps_so_far(values, 0)}
    ladder = ladder_for(system, policy, rule, (*COMMON_SETTINGS, *given_again))
    since_overflow = values.count("clean_steps", lowest=-ladder.late) + ladder.late
    cur_iter = steps_so_far(values, since_overflow)
    return scale | {
        "cur_iter": cur_iter,
        "last_overflow_iter": cur_iter - since_overflow - 1,
        "scale_factor": shared_factor(system, ladder),
        "scale_window": int(ladder.growth_interval),
    }
