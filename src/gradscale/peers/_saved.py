"""Reading what other systems saved: one value at a time, each checked."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import numpy as np

from gradscale._text import short, shown, shown_keys
from gradscale.policies.contract import Policy, ScaleState

Imported = tuple[Policy, ScaleState]

_INT32 = np.iinfo(np.int32)
# ":0" ends the name of a tensor in a TF1 graph; the other suffix is that of object-based checkpoints.
_TENSORFLOW_SUFFIX = re.compile(r"(:0)?(/\.ATTRIBUTES/VARIABLE_VALUE)?$")


@dataclass(frozen=True, slots=True)
class Saved:
    """A mapping that another system saved.

    Values may be Python numbers, numpy arrays or any framework's tensors of one element; reading a tensor
    synchronizes with its device.

    Attributes:
        what: whose mapping it is, for the error messages: "torch's GradScaler".
        values: the mapping.
    """

    what: str
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{self.what} saves a mapping. Received: {shown(self.values)}.")

    def only(self, *keys: str) -> Self:
        """Returns itself; raises unless its keys are exactly `keys`."""
        received = set(map(str, self.values))
        missing, unknown = sorted(set(keys) - received), sorted(received - set(keys))
        if missing or unknown:
            raise ValueError(
                f"{self.what} saves the keys {', '.join(keys)}. Received: {shown_keys(received)}"
                f"{f'; missing: {missing}' if missing else ''}{f'; unknown: {shown_keys(unknown)}' if unknown else ''}."
            )
        return self

    def scale(self, key: str) -> float:
        """Returns a scale: any number from zero up, as the scales of several systems reach zero or infinity."""
        value = self.number(key)
        if value < 0:
            raise ValueError(f"`{key}` of {self.what} must not be negative. Received: {short(value)}.")
        return value

    def scale32(self, key: str) -> np.float32:
        """Returns a scale that the system keeps in a float32 tensor; infinity included."""
        value = self.scale(key)
        if float(np.finfo(np.float32).max) < value < math.inf:
            raise ValueError(f"`{key}` of {self.what} must fit a float32 tensor. Received: {value!r}.")
        return np.float32(value)

    def factor(self, key: str) -> float:
        """Returns a positive, finite number."""
        value = self.number(key)
        if not 0 < value < math.inf:
            raise ValueError(f"`{key}` of {self.what} must be positive and finite. Received: {value!r}.")
        return value

    def number(self, key: str) -> float:
        """Returns a real number that is not NaN."""
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        if value != value:
            raise ValueError(f"`{key}` of {self.what} must not be NaN. Received: {value!r}. The file is damaged.")
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"`{key}` of {self.what} must fit a float. Received: an integer that does not.") from None

    def count(self, key: str, lowest: int = 0) -> int:
        """Returns an integer that is not below `lowest` and fits int32."""
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer", value)
        if not lowest <= value <= _INT32.max:
            raise ValueError(
                f"`{key}` of {self.what} must lie between {lowest} and 2**31 - 1. Received: {short(value)}."
            )
        return value

    def flag(self, key: str) -> bool:
        """Returns a bool."""
        value = self._get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "a bool", value)
        return value

    def _get(self, key: str) -> Any:
        if key not in self.values:
            raise ValueError(f"{self.what} saves the key {key!r}. Received keys: {shown_keys(self.values)}.")
        return _plain(self.values[key])

    def _wrong(self, key: str, wanted: str, value: Any) -> TypeError:
        return TypeError(f"`{key}` of {self.what} must be {wanted}. Received: {shown(value)}.")


def check_not_disabled(what: str, mapping: Mapping[str, Any]) -> None:
    """Raises if `mapping` is empty, as a disabled scaler saves it: loading it would switch scaling off in silence."""
    if not mapping:
        raise ValueError(
            f"{what} saves an empty dict from a scaler that was disabled, and there is no state in it to load. "
            "Received: an empty dict. Build the scaler with the policy wanted, or with `NoScaling()`, and load nothing."
        )


def _plain(value: Any) -> Any:
    """Returns the Python number inside an array or tensor of one element, and anything else as it is."""
    item = getattr(value, "item", None)
    if item is None and hasattr(value, "__array__"):  # a tensor of TensorFlow, a variable of Keras, a dataset of HDF5
        item = np.asarray(value).item
    if not callable(item) or isinstance(value, Mapping):
        return cast("Any", value)
    try:
        return item()
    except (TypeError, ValueError, RuntimeError):  # more than one element: the check of the type reports it
        return value


def whole_or_inside(mapping: Mapping[str, Any], *keys: str) -> Iterator[Mapping[str, Any]]:
    """Yields `mapping`, then each mapping it holds under one of `keys`: a checkpoint, or the part that matters."""
    yield mapping
    for key in keys:
        if isinstance(inner := mapping.get(key), Mapping):
            yield cast("Mapping[str, Any]", inner)


def settings_of(holder: Any, names: Sequence[str]) -> dict[str, Any]:
    """Returns the values that `holder` has under `names`; it may be a mapping, or an object with attributes."""
    values = cast("Mapping[str, Any]", holder if isinstance(holder, Mapping) else getattr(holder, "__dict__", {}))
    return {name: values[name] for name in names if name in values}


def last_name(key: str) -> str:
    """Returns the last part of a variable's name, without TensorFlow's suffix.

    >>> last_name("model/loss_scale/good_steps/.ATTRIBUTES/VARIABLE_VALUE")
    'good_steps'
    """
    return re.split(r"[/.]", _TENSORFLOW_SUFFIX.sub("", str(key)))[-1]


def picked(what: str, mapping: Mapping[str, Any], required: Sequence[str], settings: Sequence[str] = ()) -> Saved:
    """Returns the variables called `required`, and those of the `settings` that are there.

    A key is a bare name, or a path that ends in one: `optimizer/loss_scale/good_steps`, `manager.scale_sense`. Paths
    that end in another name belong to the rest of the checkpoint; a bare name must be known.
    """
    found: dict[str, Any] = {}
    for key, value in Saved(what, mapping).values.items():
        name = last_name(key)
        if name != str(key) and name not in (*required, *settings):
            continue
        if name in found:
            raise ValueError(
                f"{what} saves one `{name}`. Received two, the second as {short(key)}. Pass the part of one."
            )
        found[name] = value
    return Saved(what, found).only(*required, *(name for name in settings if name in found))


def without_weights(mapping: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns `mapping` without the arrays and tensors whose name is not one of `names`.

    For systems whose checkpoints have bare names for everything. A plain number stays: a user added it.
    """
    return {key: value for key, value in mapping.items() if last_name(key) in names or not hasattr(value, "shape")}


def started(policy: Any, **leaves: Any) -> Imported:
    """Returns `policy` and its first state with `leaves` set, in the types of that state; raises if they do not fit."""
    start = policy.start()
    return policy, replace(start, **{name: _typed(name, getattr(start, name), value) for name, value in leaves.items()})


def _typed(name: str, like: Any, value: Any) -> Any:
    if like.dtype.kind == "f" and float(np.finfo(like.dtype).max) < abs(value) < math.inf:
        raise ValueError(f"`{name}` of a saved state must fit {like.dtype}. Received: {value!r}.")
    return like.dtype.type(value)
