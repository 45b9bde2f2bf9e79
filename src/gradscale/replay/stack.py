"""Policies of one kind as one policy whose settings are vectors, so that thousands run as fast as a few."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import numpy as np

from gradscale.policies.contract import Policy, ScaleState
from gradscale.record import fields, number_type, with_values


@dataclass(frozen=True, slots=True)
class Stack:
    """Policies that run together.

    Attributes:
        members: index of each in the caller's list.
        policy: one policy for all of them; a setting they do not share is a vector.
        state: their first states, as one state of vectors.
    """

    members: list[int]
    policy: Any
    state: Any


def stacked(policies: Sequence[Policy]) -> list[Stack]:
    """Returns the policies in as few stacks as keep the scales of each bit-exact."""
    starts = [policy.start() for policy in policies]
    groups: dict[Any, list[int]] = {}
    with np.errstate(over="ignore"):
        for index, (policy, start) in enumerate(zip(policies, starts, strict=True)):
            groups.setdefault(_key(policy, start), []).append(index)
    return [
        _stack(members, [policies[i] for i in members], [starts[i] for i in members]) for members in groups.values()
    ]


def unstacked(state: Any, size: int) -> list[ScaleState]:
    """Returns a state of vectors as one state of scalars for each policy."""
    columns = {field.name: np.broadcast_to(getattr(state, field.name), (size,)) for field in fields(state)}
    return [with_values(state, {name: column[i] for name, column in columns.items()}) for i in range(size)]


def _key(policy: Any, start: ScaleState) -> Any:
    """Returns what policies must share to be stacked: the class, and every setting that cannot become a vector."""
    if not dataclasses.is_dataclass(policy):  # a user's own policy, of which nothing is known: a stack of its own
        return id(policy)
    dtype = np.dtype(start.scale.dtype)
    shared: list[Any] = [type(policy)]
    for name, number in _settings(type(policy)).items():
        value = getattr(policy, name)
        if not _fits(value, number, dtype):
            shared += [name, type(value), value]
    return tuple(shared)


def _fits(value: Any, number: type | None, scale_dtype: np.dtype[Any]) -> bool:
    """Returns whether a vector can hold `value` without changing any scale."""
    # A Python number is rounded to float32 in float32 arithmetic, but not in float64 arithmetic, and a rule may use it
    # in both. Only a number that rounding does not change has the same effect in a vector.
    if value is None or number not in (int, float):
        return False
    return -(2**31) <= value < 2**31 if number is int else float(scale_dtype.type(value)) == value


def _stack(members: list[int], policies: Sequence[Policy], starts: Sequence[Any]) -> Stack:
    first, scale_dtype = policies[0], np.dtype(starts[0].scale.dtype)
    columns: dict[str, Any] = {}
    for name, number in _settings(type(first)).items():
        if _fits(getattr(first, name), number, scale_dtype):
            values = [getattr(policy, name) for policy in policies]
            columns[name] = np.asarray(values, dtype=scale_dtype if number is float else np.int32)
    leaves = {field.name: np.asarray([getattr(start, field.name) for start in starts]) for field in fields(starts[0])}
    return Stack(members, with_values(first, columns), with_values(starts[0], leaves))


@functools.cache
def _settings(policy_class: type) -> dict[str, type | None]:
    """Returns the settings of a class of policies, with the type of number each holds, or None."""
    if not dataclasses.is_dataclass(policy_class):
        return {}
    hints = get_type_hints(policy_class)
    return {field.name: number_type(hints[field.name]) for field in fields(policy_class)}
