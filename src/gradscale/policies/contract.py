"""The contract between a policy and a step: what was seen, the state of a scale, and the rule that changes it."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from gradscale._text import short
from gradscale.policies.arithmetic import Namespace, bounded, smaller
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE, USELESS_SCALE
from gradscale.record import Array, Record, leaf


@dataclass(frozen=True, slots=True)
class Seen:
    """What one read of the unscaled gradients found.

    A framework's adapter fills in what the policy's `needs` and the caller ask for; the rest keeps its default and is
    not read. Leaves are scalars, or vectors where many policies run at once.

    On an overflow (`finite` is False) `amax` and `norm` are inf: the largest gradient is not known then. No rule reads
    them as numbers; the flags alone decide.

    Attributes:
        finite: no gradient is inf or NaN, before or after unscaling.
        loss_finite: the loss itself was finite. No scale can fix one that was not.
        amax: largest magnitude of any gradient; inf on an overflow.
        norm: Euclidean norm over all gradients; inf on an overflow.
        upper_share: share of gradient elements above the edge that a `Histogram` policy watches.
    """

    finite: Array = np.bool_(True)
    loss_finite: Array = np.bool_(True)
    amax: Array = np.float32(0)
    norm: Array = np.float32(0)
    upper_share: Array = np.float32(0)


@dataclass(frozen=True, slots=True)
class ScaleState(Record):
    """Everything a scale remembers between two steps. Immutable: a step returns a new one.

    Attributes:
        scale: what the loss is multiplied by, and the gradients divided by.
        clean_steps: clean steps in a row that count towards the next growth.
        credits: overflows until one lowers the scale.
        applied: steps applied so far.
        skipped: steps skipped so far, for any reason.
        consecutive_skips: steps skipped since the last applied one.
        stuck: the last step overflowed, and the scale could not go lower.
    """

    scale: Array = leaf("float32")
    clean_steps: Array = leaf("int32", 0)
    credits: Array = leaf("int32", 1)
    applied: Array = leaf("int32", 0)
    skipped: Array = leaf("int32", 0)
    consecutive_skips: Array = leaf("int32", 0)
    stuck: Array = leaf("bool", False)


S = TypeVar("S", bound=ScaleState)

MOST_STEPS = 2**31 - 1
"""Where counters stop: the largest int32."""


class Policy(Protocol):
    """A rule for the scale: two pure methods over frozen values.

    `next` never branches on a value, mutates, or synchronizes with a device. It runs on the arrays of any framework, on
    scalars or on vectors of states, and with settings that are numbers or vectors themselves.
    """

    needs: ClassVar[frozenset[str]]
    """Names of the `Seen` fields that `next` reads. An adapter measures these and no others.

    A class may also have `is_compiled = True`: `next` consists of operators and functions of `xp` alone, so that in
    host memory it can be run as one function (`gradscale.policies.compiled`), and on a GPU as one kernel.
    """

    def start(self) -> Any:
        """Returns the state before the first step, with numpy leaves."""
        ...

    def next(self, state: Any, seen: Seen, xp: Namespace) -> Any:
        """Returns the state after a step in which `seen` was found."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as a plain dict."""
        ...


def one_more(count: Array, xp: Namespace) -> Array:
    """Returns `count` plus 1; a counter at the largest int32 stays there, where it would become negative."""
    return smaller(count, MOST_STEPS - 1, xp) + 1


def counted(state: S, applied: Array, xp: Namespace, **changes: Array) -> S:
    """Returns `state` with `changes`, and with the step counted as applied or skipped."""
    return replace(
        state,
        applied=xp.where(applied, one_more(state.applied, xp), state.applied),
        skipped=xp.where(applied, state.skipped, one_more(state.skipped, xp)),
        consecutive_skips=xp.where(applied, 0, one_more(state.consecutive_skips, xp)),
        **changes,
    )


def counted_as_applied(before: S, after: S, seen: Seen, xp: Namespace) -> S:
    """Returns the state `after` a step that is applied if its gradients are finite, whatever the loss was."""
    anyway = xp.logical_and(seen.finite, xp.logical_not(seen.loss_finite))
    return replace(
        after,
        applied=xp.where(anyway, one_more(before.applied, xp), after.applied),
        skipped=xp.where(anyway, before.skipped, after.skipped),
        consecutive_skips=xp.where(anyway, 0, after.consecutive_skips),
    )


def verdict(seen: Seen, xp: Namespace) -> tuple[Array, Array]:
    """Returns (clean, overflow). Both are False when the loss was not finite: then the scale is not the cause."""
    # torch.amp cannot make this distinction, and lowers the scale for a NaN in the forward pass too.
    clean = xp.logical_and(seen.finite, seen.loss_finite)
    overflow = xp.logical_and(xp.logical_not(seen.finite), seen.loss_finite)
    return clean, overflow


def advanced(policy: Policy, state: S, seen: Seen, xp: Namespace) -> S:
    """Returns the state after a step of a run: that of `policy.next`, with a scale that gradients can be divided by.

    The rules of other systems have no bounds, or wider ones: their scales reach 0, numbers that a device flushes to 0,
    and infinity. Here they stop at 2**-126 and 2**126, and an overflow at 2**-24 or below is `stuck`. Policies that
    never go as low, or as high, are not changed, at no cost.
    """
    # A namespace of scalars has the rule as one function.
    if (rule := getattr(xp, "rule", None)) is not None:
        return rule(policy)(state, seen)
    return bounded_next(policy, state, seen, xp)


def bounded_next(policy: Policy, state: S, seen: Seen, xp: Namespace) -> S:
    """Returns what `advanced` does, operation by operation."""
    after = policy.next(state, seen, xp)
    # Known while a step is traced or before it runs: no value is read.
    if _stays_useful(policy):
        return after
    applied = xp.logical_and(seen.finite, seen.loss_finite)
    useless = xp.logical_and(xp.logical_not(applied), state.scale <= USELESS_SCALE)
    return replace(
        after,
        scale=bounded(after.scale, LOWEST_SCALE, HIGHEST_SCALE, xp),
        stuck=xp.logical_or(after.stuck, useless),
    )


def _stays_useful(policy: Any) -> bool:
    """Returns whether the policy itself keeps its scale where a lower one may help, and its reciprocal is normal."""
    if not policy.needs:
        return True  # it reads nothing, so that nothing moves its scale
    fixed = getattr(policy, "scale", None)
    low = getattr(policy, "min_scale", 0.0) if fixed is None else fixed
    high = getattr(policy, "max_scale", np.inf) if fixed is None else fixed
    return bool(USELESS_SCALE <= low and high <= HIGHEST_SCALE)


def backed_off(policy: Policy, state: S, overflow: Seen, xp: Namespace) -> S:
    """Returns `state` after one backoff, whatever the hysteresis, with its counters unchanged: to run a step again.

    `overflow` is a `Seen` with finite=False and loss_finite=True, in the framework's own arrays.
    """
    # One credit left, so that this overflow backs off: a retry at the same scale would overflow again.
    lowered = advanced(policy, replace(state, credits=state.credits * 0 + 1), overflow, xp)
    return replace(
        lowered,
        credits=state.credits,
        applied=state.applied,
        skipped=state.skipped,
        consecutive_skips=state.consecutive_skips,
    )


def check_policy(policy: Any) -> None:
    """Raises if `policy` is not a policy that a scaler can run, or is the class of one."""
    if isinstance(policy, type) or not callable(getattr(policy, "next", None)):
        fix = ""
        if isinstance(policy, type) and hasattr(policy, "next"):
            fix = f" This is a class: make one of it, as `{policy.__name__}()`."
        elif isinstance(policy, int | float) and not isinstance(policy, bool):
            fix = f" For a fixed scale use `Static({policy!r})`, for a first one `Dynamic(init_scale={policy!r})`."
        raise TypeError(
            "`policy` must be a policy, such as `Dynamic()`, or the name of one. "
            f"Received: policy={' '.join(short(policy).split())}.{fix}"
        )
    if "upper_share" in policy.needs and not hasattr(policy, "edge_magnitude"):
        raise TypeError(
            "A policy that needs `upper_share` must have an `edge_magnitude`, as `Histogram` has. "
            f"Received: policy={policy!r}."
        )
