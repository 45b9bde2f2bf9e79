"""Rules and decisions in host memory, as numpy scalars, with any version of numpy."""

from collections.abc import Callable
from functools import cache, partial
from types import NoneType
from typing import Any, cast

import numpy as np

from gradscale.engine.decide import Outcome, decide, unscale_and_clip
from gradscale.engine.measurement import Measurement, with_amax
from gradscale.policies.arithmetic import Namespace
from gradscale.policies.compiled import compiled
from gradscale.policies.contract import Policy, ScaleState, Seen, advanced
from gradscale.policies.scalars import EXACT, SCALARS
from gradscale.record import Array, numbers, with_values


@np.errstate(all="ignore")  # inf and NaN are facts here, and no reason for a warning
def on_host(function: Callable[..., Any], *operands: Any) -> Any:
    """Returns `function(*operands, xp)` for records and numbers in host memory."""
    if EXACT:
        return function(*operands, SCALARS)
    # Vectors of one element: in numpy 1, a float32 scalar times a Python number is float64, but an array stays float32.
    return scalar(function(*map(vector, operands), np))


def host_function(function: Callable[..., Any], **operands: Any) -> Callable[..., Any]:
    """Returns `function`, whose last argument is a namespace, as one of records and numbers in host memory.

    numpy's warnings must be off when it is called. `operands` are any that it could be called with.
    """
    if EXACT:
        return compiled(function, **operands)
    return lambda *operands: on_host(function, *operands)


def rule_on_host(policy: Policy) -> Callable[[ScaleState, Seen], ScaleState]:
    """Returns the rule of a policy as a function of a state and of what was seen. numpy's warnings must be off."""
    return SCALARS.rule(policy) if EXACT else lambda state, seen: on_host(partial(advanced, policy), state, seen)


@cache
def seeing(kinds: tuple[type, ...]) -> Callable[[Measurement, np.float32, np.bool_, np.bool_], Seen]:
    """Returns `Measurement.seen` for measurements whose fields have these types: of the divisor, and two flags."""
    example = Measurement(*(None if kind is NoneType else kind(1) for kind in kinds))
    flag = np.bool_(True)

    def seen(measurement: Measurement, divisor: Array, loss_finite: Array, overflowed: Array, xp: Namespace) -> Seen:
        return measurement.seen(divisor, loss_finite, xp, overflowed)

    return host_function(seen, measurement=example, divisor=np.float32(1), loss_finite=flag, overflowed=flag)


_ONE = np.float32(1)

factor_on_host = host_function(unscale_and_clip, divisor=_ONE, norm=_ONE, clip_norm=_ONE)
"""`unscale_and_clip` of numbers in host memory."""


def _estimated(seen: Seen, ratio: Array, xp: Namespace) -> Seen:
    return with_amax(seen, ratio, xp, measured=False)[0]


def _ratio(seen: Seen, ratio: Array, xp: Namespace) -> Array:
    return with_amax(seen, ratio, xp, measured=True)[1]


estimate_on_host = host_function(_estimated, seen=Seen(), ratio=_ONE)
"""What was seen of a step, with the largest magnitude estimated from the norm."""

ratio_on_host = host_function(_ratio, seen=Seen(), ratio=_ONE)
"""The ratio of the largest magnitude to the norm, or the one before where it is not known."""


def decide_on_host(
    policy: Policy, state: ScaleState, seen: Seen, clip_norm: float | None, divisor: float | None = None
) -> Outcome:
    """Returns what `decide` does, as numpy scalars."""

    def decided(state: Any, seen: Any, by: Any, xp: Any) -> Outcome:
        return decide(policy, state, seen, xp, clip_norm, by)

    return on_host(decided, state, seen, state.scale if divisor is None else np.float32(divisor))


def vector(value: Any) -> Any:
    """Returns a number, or each of a record, as a vector of one element."""
    if isinstance(value, np.generic):
        return np.atleast_1d(cast(Any, value))
    if isinstance(value, Measurement):
        return Measurement._make(None if each is None else vector(each) for each in value)
    return with_values(value, {name: np.atleast_1d(each) for name, each in numbers(value).items()})


def scalar(value: Any) -> Any:
    """Returns a vector of one element, or each of a record or a tuple, as a number."""
    if isinstance(value, np.ndarray):
        return cast(Any, value).reshape(())[()]
    if isinstance(value, tuple):
        return tuple(scalar(each) for each in cast("tuple[Any, ...]", value))
    if isinstance(value, Outcome):
        return Outcome(scalar(value.state), scalar(value.applied), scalar(value.factor))
    return with_values(value, {name: np.reshape(each, ())[()] for name, each in numbers(value).items()})
