"""The state of a policy as Keras variables: Keras's own two first, and the rest packed into two vectors.

Also reads the variables of a saved optimizer: of this class with any policy, or of Keras's own, which has fewer.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import NoScaling, Static
from gradscale.record import Array, fields, with_values

KERAS_NAMES = {"step_counter": "clean_steps", "dynamic_scale": "scale"}
"""The variables that Keras's own class has, and the fields of a state that they hold."""

PACKED = {"scale_counters": "int32", "scale_memory": "float32"}
"""The variables that hold all other fields, in their order. Only a policy that remembers numbers has the second."""

FIRST = 2
"""Variables that every Keras optimizer has before those of the scale: the iteration and the learning rate."""

SCALE_INDEX = FIRST + list(KERAS_NAMES).index("dynamic_scale")
"""Index of the scale among the optimizer's variables."""

COUNTERS = ("applied", "skipped", "consecutive_skips")
"""Fields that are kept when the policy changes. The other fields of a state have no meaning for another policy."""


@dataclass(frozen=True, slots=True)
class StateVariable:
    """One variable, and the fields of the state that it holds.

    Attributes:
        name: name of the variable.
        dtype: the type of its elements, as the rule sees them.
        fields: names of the state's fields, in order.
        start: their values before the first step.
    """

    name: str
    dtype: str
    fields: tuple[str, ...]
    start: np.ndarray[Any, Any]

    def added_to(self, optimizer: Any) -> Any:
        """Adds the variable to `optimizer` and returns it."""
        # Keras keeps the counter in the integers of the backend, int64 on some, and so does its checkpoint.
        dtype = "int" if self.name == "step_counter" else self.dtype
        return optimizer.add_variable(
            shape=self.start.shape,
            dtype=dtype,
            initializer=lambda shape, dtype=None: keras.ops.reshape(
                keras.ops.convert_to_tensor(self.start, dtype), shape
            ),
            aggregation="none",
            name=self.name,
        )

    def with_counters(self, counters: Any) -> Any:
        """Returns the start with saved counters in it."""
        # The counters are fields of the common base state, so they have the same index under every policy.
        values = self.start.copy()
        indices = [index for index, field in enumerate(self.fields) if field in COUNTERS]
        if len(counters):
            values[indices] = np.asarray(counters)[indices]
        return values


class StateLayout:
    """How the fields of a state are assigned to variables.

    On JAX every variable is an array that goes in and out of the compiled step: with six arrays for the state a step
    took 1.03 times as long as with Keras's own class, with two 1.00.

    Attributes:
        start: the state before the first step.
        variables: the variables that hold a state: `step_counter`, `dynamic_scale`, then one for all other integers
            and flags, and one for all other numbers where the policy has any.
    """

    __slots__ = ("start", "variables")

    def __init__(self, start: ScaleState) -> None:
        self.start = start
        self.variables = tuple(_variables(start))

    def state(self, values: Sequence[Any], leaves: Callable[[Any, str], Sequence[Array]]) -> Any:
        """Returns the state that the variables hold, as `leaves` unpacks the values of a type."""
        found: dict[str, Any] = {}
        for variable, value in zip(self.variables, values, strict=True):
            found |= dict(zip(variable.fields, leaves(value, variable.dtype), strict=True))
        # A flag is packed with the integers, and is unpacked as one.
        flags = [field.name for field in fields(self.start) if field.metadata["dtype"] == "bool"]
        return with_values(self.start, found | {name: found[name] != 0 for name in flags})

    def values(self, state: ScaleState, vector: Callable[[Sequence[Array], str], Any]) -> list[Any]:
        """Returns the values to assign to the variables, as `vector` packs leaves of a type."""
        vectors = [vector([getattr(state, name) for name in one.fields], one.dtype) for one in self.variables]
        return [each[0] if one.name in KERAS_NAMES else each for one, each in zip(self.variables, vectors, strict=True)]

    def completed(self, store: Mapping[str, Any], count: int) -> Mapping[str, Any]:
        """Returns saved variables by index, with those of the scale's state as this layout has them.

        Keras's own class saves fewer of them, and another policy others. The scale and the counters are kept; the other
        fields start again. `count` is how many variables the optimizer has.
        """
        shared = FIRST + len(KERAS_NAMES)
        packed = self.variables[len(KERAS_NAMES) :]
        values = [store[str(index)] for index in range(len(store.keys()))]
        # A file has no names. With the same inner optimizer, the difference in length is how many packed variables the
        # file has. Anything but vectors in their place means another inner optimizer, and Keras reports that itself.
        first_inner = shared + len(values) - (count - len(packed))
        saved = values[shared : max(first_inner, shared)]
        other_inner = not shared <= first_inner <= shared + len(PACKED) or any(np.ndim(value) != 1 for value in saved)
        if other_inner or [np.shape(value) for value in saved] == [variable.start.shape for variable in packed]:
            return store
        values[shared:first_inner] = [variable.with_counters(saved[0] if saved else ()) for variable in packed]
        return {str(index): value for index, value in enumerate(values)}


def fitted(state: ScaleState, policy: Policy) -> ScaleState:
    """Returns a saved state with a scale that the policy can have: its settings take precedence over the file's.

    Warns where the saved scale cannot be used: Keras's own rule may have saved infinity or zero.
    """
    start = policy.start().scale
    if isinstance(policy, Static | NoScaling):
        return replace(state, scale=start)
    if not LOWEST_SCALE <= state.scale <= HIGHEST_SCALE:
        warnings.warn(
            f"The saved scale is {float(state.scale)}, at which every step is skipped. "
            f"It starts again at {float(start)}.",
            stacklevel=3,
        )
        return replace(state, scale=start)
    low, high = getattr(policy, "min_scale", LOWEST_SCALE), getattr(policy, "max_scale", HIGHEST_SCALE)
    return replace(state, scale=np.clip(np.float32(state.scale), np.float32(low), np.float32(high)))


def on_host(value: Any, dtype: str) -> list[Any]:
    """Returns the elements of a variable's value as numpy scalars of a type. Synchronizes with the device."""
    return list(np.asarray(keras.ops.convert_to_numpy(keras.ops.reshape(value, (-1,))), dtype))


def _variables(start: ScaleState) -> Iterator[StateVariable]:
    types = {field.name: "float32" if field.metadata["dtype"] == "float32" else "int32" for field in fields(start)}
    for name, field in KERAS_NAMES.items():
        yield StateVariable(name, types[field], (field,), np.asarray(getattr(start, field), types[field]))
    for name, dtype in PACKED.items():
        held = tuple(field for field, kind in types.items() if kind == dtype and field not in KERAS_NAMES.values())
        if held:
            yield StateVariable(name, dtype, held, np.array([getattr(start, field) for field in held], dtype))
