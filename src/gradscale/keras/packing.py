"""A policy's state as Keras variables: Keras' own two first, and the rest packed, as every variable costs time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from gradscale.policies.contract import ScaleState
from gradscale.record import Array, fields, with_values

OWN = {"step_counter": "clean_steps", "dynamic_scale": "scale"}
"""What Keras calls the two parts of the state that it has itself."""

EXTRA = {"scale_counters": "int32", "scale_memory": "float32"}
"""The variables that hold the rest, in their order. Only a policy that remembers numbers has the second."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One variable, and the parts of the state that it holds.

    Attributes:
        name: what the variable is called.
        dtype: the type of its elements, as the rule sees them.
        parts: names of the state's fields, in order.
        values: what they are before the first step.
    """

    name: str
    dtype: str
    parts: tuple[str, ...]
    values: np.ndarray[Any, Any]


class Packing:
    """How the states of a policy are spread over variables.

    Attributes:
        start: the state before the first step.
        slots: the variables that hold a state: `step_counter`, `dynamic_scale`, then one for all other integers and
            flags, and one for all other numbers where the policy has any.
    """

    __slots__ = ("slots", "start")

    def __init__(self, start: ScaleState) -> None:
        self.start = start
        self.slots = tuple(_slots(start))

    def state(self, values: Sequence[Any], leaves: Callable[[Any, str], Sequence[Array]]) -> Any:
        """Returns the state that the variables hold, as `leaves` takes the values of a type apart."""
        found: dict[str, Any] = {}
        for slot, value in zip(self.slots, values, strict=True):
            found |= dict(zip(slot.parts, leaves(value, slot.dtype), strict=True))
        flags = {name: found[name] != 0 for name in _flags(self.start)}
        return with_values(self.start, found | flags)

    def values(self, state: ScaleState, vector: Callable[[Sequence[Array], str], Any]) -> list[Any]:
        """Returns what the variables are to be assigned, as `vector` puts leaves of a type together."""
        vectors = [vector([getattr(state, part) for part in slot.parts], slot.dtype) for slot in self.slots]
        return [one[0] if slot.name in OWN else one for slot, one in zip(self.slots, vectors, strict=True)]


def on_host(value: Any, dtype: str) -> list[Any]:
    """Returns the elements of a variable's value as numpy scalars of a type. Waits for the device."""
    return list(np.asarray(keras.ops.convert_to_numpy(keras.ops.reshape(value, (-1,))), dtype))


def _slots(start: ScaleState) -> Iterator[Slot]:
    kinds = {field.name: "float32" if field.metadata["dtype"] == "float32" else "int32" for field in fields(start)}
    for name, part in OWN.items():
        yield Slot(name, kinds[part], (part,), np.asarray(getattr(start, part), kinds[part]))
    for name, dtype in EXTRA.items():
        parts = tuple(part for part, kind in kinds.items() if kind == dtype and part not in OWN.values())
        if parts:
            yield Slot(name, dtype, parts, np.array([getattr(start, part) for part in parts], dtype))


def _flags(start: ScaleState) -> list[str]:
    return [field.name for field in fields(start) if field.metadata["dtype"] == "bool"]
