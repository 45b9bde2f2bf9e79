"""Replay: what any policies would have done over a recorded sequence of steps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard, cast

import numpy as np

from gradscale.formats import FP16, Format, get_format
from gradscale.peers.specs import as_policy
from gradscale.policies.contract import Policy, ScaleState
from gradscale.replay.stack import Stack, stacked, unstacked
from gradscale.replay.track import Track, read_track

Matrix = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy's run in numbers.

    Attributes:
        steps: steps replayed.
        skipped: steps that were not applied.
        final_scale: scale after the last step.
        lowest_scale: smallest scale after any step.
        highest_scale: largest scale after any step.
        steps_at_floor: steps that left the scale at the policy's lower bound, where it has one.
        steps_at_ceiling: steps that left the scale at the policy's upper bound, where it has one.
        first_stuck_step: index of the first overflow at which the scale could not go lower; None without one.
    """

    steps: int
    skipped: int
    final_scale: float
    lowest_scale: float
    highest_scale: float
    steps_at_floor: int
    steps_at_ceiling: int
    first_stuck_step: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The result of a replay: read-only arrays of shape (steps,) for one policy, (steps, policies) for a list.

    Attributes:
        policies: the policies, in the caller's order.
        scales: the scale after each step.
        scales_before: the scale that each step ran with.
        skipped: whether each step was skipped.
        stuck: whether each step overflowed and the scale could not go lower.
    """

    policies: tuple[Policy, ...]
    scales: Matrix
    scales_before: Matrix
    skipped: Matrix
    stuck: Matrix
    _finals: tuple[Stack, ...] = field(repr=False)

    def states(self) -> tuple[ScaleState, ...]:
        """Returns the state of each policy after the last step, in the caller's order."""
        states: dict[int, ScaleState] = {}
        for stack in self._finals:
            states.update(zip(stack.members, unstacked(stack.state, len(stack.members)), strict=True))
        return tuple(states[index] for index in range(len(self.policies)))

    def summaries(self) -> tuple[Summary, ...]:
        """Returns each policy's run in numbers, in the caller's order; `dataclasses.asdict` makes a row of one."""
        runs = zip(self.policies, *(np.atleast_2d(a.T) for a in (self.scales, self.skipped, self.stuck)), strict=True)
        return tuple(_summary(*run) for run in runs)


def replay(
    policies: Policy | str | Iterable[Policy | str],
    found_inf: Sequence[float] | Matrix | None = None,
    amax: Sequence[float] | Matrix | None = None,
    format: Format | str = FP16,
    *,
    loss_finite: Sequence[float] | Matrix | None = None,
    upper_share: Sequence[float] | Matrix | None = None,
) -> Replay:
    """Returns what each policy would have done over a sequence of steps.

    With `found_inf` the flags say which steps overflow, whatever the scale. With `amax` alone a step overflows where
    `amax` times the policy's scale reaches the format's `overflow_threshold`, and where `amax` is not finite.

    Policies of one kind run as vectors: a thousand take little longer than one. The scales of each are bit-exact to a
    run of its own.

    Args:
        policies: one policy or its name, such as `"dynamic:growth_interval=100"`, or any number of them.
        found_inf: for each step, whether a gradient was inf or NaN.
        amax: for each step, the largest magnitude of any unscaled gradient.
        format: the format in which gradients overflow; read where `amax` decides.
        loss_finite: for each step, whether the loss was finite; always, if not given.
        upper_share: for each step, the share of gradients above the edge that a histogram policy watches.

    Raises:
        TypeError: something is not a policy, or a sequence does not hold numbers.
        ValueError: a name is not that of a policy, nothing says which steps overflow, a policy reads what is not known,
            lengths differ, there is no step or no policy, or a value is out of range.

    >>> from gradscale import Dynamic, Static
    >>> run = replay([Dynamic(growth_interval=2), Static(1024)], found_inf=[0, 0, 1, 0])
    >>> run.scales[:, 0].tolist(), run.scales[:, 1].tolist()
    ([65536.0, 131072.0, 65536.0, 65536.0], [1024.0, 1024.0, 1024.0, 1024.0])
    >>> replay(Dynamic(), amax=[0.5, 1.5, 1.5]).skipped.tolist()
    [False, True, False]
    """
    single = isinstance(policies, str) or _is_policy(policies)
    chosen = _checked((policies,) if single else policies)
    track = read_track(found_inf, amax, loss_finite, upper_share, get_format(format))
    for policy in chosen:
        track.check_known(policy)
    scales, skipped, stuck, finals = _run_all(stacked(chosen), track, len(chosen))
    pick: Any = (slice(None), 0) if single else slice(None)
    for array in (scales, skipped, stuck):
        array.setflags(write=False)
    return Replay(chosen, scales[1:][pick], scales[:-1][pick], skipped[pick], stuck[pick], finals)


def _is_policy(value: Any) -> TypeGuard[Policy]:
    return not isinstance(value, type) and all(hasattr(value, name) for name in ("needs", "start", "next"))


def _checked(policies: Any) -> tuple[Policy, ...]:
    """Returns the policies of a list that has at least one, and nothing else."""
    if isinstance(policies, bytes | Mapping) or not isinstance(policies, Iterable):
        raise TypeError(f"`policies` must be a policy or a list of them. Received: {policies!r}.")
    chosen = tuple(as_policy(each) if isinstance(each, str) else each for each in cast(Iterable[Any], policies))
    for index, policy in enumerate(chosen):
        if not _is_policy(policy):
            raise TypeError(f"`policies` must hold policies, such as `Dynamic()`. Received: {policy!r} at {index}.")
    if not chosen:
        raise ValueError("`policies` must hold at least one policy. Received an empty list.")
    return chosen


def _run_all(stacks: Sequence[Stack], track: Track, size: int) -> tuple[Matrix, Matrix, Matrix, tuple[Stack, ...]]:
    """Returns the scales (the first ones included), the skips, the stuck steps, and the stacks in their last states."""
    scales = np.empty((track.steps + 1, size), np.result_type(*(stack.state.scale for stack in stacks)))
    skipped, stuck = (np.empty((track.steps, size), bool) for _ in range(2))
    finals: list[Stack] = []
    first = 0
    for stack in stacks:
        columns = slice(first, first + len(stack.members))
        finals.append(_run(stack, track, scales[:, columns], skipped[:, columns], stuck[:, columns]))
        first = columns.stop
    # Stacks are in an order of their own; one stack is in the caller's already, and is not copied.
    if len(stacks) > 1:
        order = np.argsort(np.concatenate([stack.members for stack in stacks]))
        scales, skipped, stuck = (array[:, order] for array in (scales, skipped, stuck))
    return scales, skipped, stuck, tuple(finals)


def _run(stack: Stack, track: Track, scales: Matrix, skipped: Matrix, stuck: Matrix) -> Stack:
    """Returns the stack in its last state; writes one row per step into the arrays."""
    policy, state = stack.policy, stack.state
    scales[0] = state.scale
    for step in range(track.steps):
        after = policy.next(state, track.seen(step, state.scale, policy.needs), np)
        scales[step + 1] = after.scale
        # From the counters, not from the flags: a policy may apply a step whatever was measured.
        np.not_equal(after.skipped, state.skipped, out=skipped[step])
        stuck[step] = after.stuck
        state = after
    return replace(stack, state=state)


def _summary(policy: Policy, scales: Matrix, skipped: Matrix, stuck: Matrix) -> Summary:
    floor = getattr(policy, "min_scale", getattr(policy, "floor", -np.inf))
    ceiling = getattr(policy, "max_scale", getattr(policy, "ceiling", np.inf))
    return Summary(
        steps=len(scales),
        skipped=int(skipped.sum()),
        final_scale=float(scales[-1]),
        lowest_scale=float(scales.min()),
        highest_scale=float(scales.max()),
        steps_at_floor=int((scales <= floor).sum()),
        steps_at_ceiling=int((scales >= ceiling).sum()),
        first_stuck_step=int(stuck.argmax()) if stuck.any() else None,
    )
