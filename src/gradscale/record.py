"""Plain-dict form of the frozen dataclasses: written and read from their fields, checked value by value."""

import copy
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, Self, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np

from gradscale._text import number_text, short, shown, shown_keys
from gradscale.formats import Format, get_format

R = TypeVar("R")

SCHEMA = 1
"""Version of the dict form. Raised when a key is renamed, removed or changes its meaning."""

OTHER_KEYS = (
    "Another version of gradscale wrote it, or it was changed since. "
    "Load it with that version, or leave it out and start with a new one."
)
"""What to do about a saved record whose keys are not those of its class."""

Plain = bool | int | float | str | Format | None
"""What is compared with a default. Arrays are not: that has many answers, or synchronizes."""

Array = Any
"""An array or scalar of the framework that runs the rule: numpy, torch, JAX, TensorFlow."""


def leaf(dtype: str, default: float | bool | None = None, *, signed: bool = False) -> Any:
    """Returns a dataclass field that holds an array of `dtype`, with what `from_dict` needs to check it.

    Args:
        dtype: numpy's name of the element type; floats may also arrive in a wider type and keep it.
        default: value of the field when none is given; without one the field is required.
        signed: whether values below zero are legal.
    """
    metadata = {"dtype": dtype, "signed": signed}
    if default is None:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=np.dtype(dtype).type(default), metadata=metadata)


class Record:
    """Base of the frozen dataclasses that are saved: policies and states.

    The dict form holds plain Python numbers, strings and lists, so it goes through JSON unchanged. It carries the
    schema version and the class name, and unknown keys are refused when it is read.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """Returns the settings that are not the default, as they would be written. States show all their fields."""
        return settings_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns the record as plain Python values, with its schema version and kind.

        Synchronizes with the device of the fields, if they are on one. Infinity is written as the string `"inf"`, which
        JSON has no number for.
        """
        body = {field.name: plain(getattr(self, field.name)) for field in fields(self)}
        return {"schema": SCHEMA, "kind": type(self).__name__, **body}

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Self:
        """Returns the record that `to_dict` wrote.

        Raises:
            TypeError: `mapping` is not a mapping, or a value has the wrong type.
            ValueError: another schema or kind, a key missing or unknown, or a value out of range.
        """
        body = _checked_body(cls, mapping)
        hints = get_type_hints(cls)
        names = fields(cls)
        return cls(**{field.name: _read(cls, field, hints[field.name], body[field.name]) for field in names})


def settings_text(record: Any) -> str:
    """Returns a dataclass with the settings that are not the default, as it would be written; all else cut short.

    >>> from gradscale.policies.dynamic import Dynamic
    >>> settings_text(Dynamic(growth_interval=100, min_scale=2.0**-24))
    'Dynamic(growth_interval=100, min_scale=2**-24)'
    """
    if not dataclasses.is_dataclass(record):
        return short(record)
    settings = [field for field in dataclasses.fields(record) if field.init]
    values = {field.name: getattr(record, field.name) for field in settings}
    missing = dataclasses.MISSING
    required = [field.name for field in settings if field.default is missing and field.default_factory is missing]
    usual: Any = None
    if all(isinstance(values[name], Plain) for name in required):
        with suppress(TypeError, ValueError):  # what is required may not fit the defaults
            # As settings are rounded and converted when a policy is made, so are its defaults.
            usual = type(record)(**{name: values[name] for name in required})
    changed = [name for name in values if name in required or usual is None or not _is_same(record, usual, name)]
    return f"{type(record).__name__}({', '.join(f'{name}={_setting_text(values[name])}' for name in changed)})"


def _is_same(record: Any, usual: Any, name: str) -> bool:
    value = getattr(record, name)
    return isinstance(value, Plain) and value == getattr(usual, name)


def _setting_text(value: Any) -> str:
    if isinstance(value, Format):
        return value.name
    return short(value) if isinstance(value, str) else number_text(value)


def fields(record: Any) -> tuple[dataclasses.Field[Any], ...]:
    """Returns the dataclass fields of a record or of its class."""
    return dataclasses.fields(record)


def place(record: R, put: Callable[[np.ndarray[Any, Any]], Array]) -> R:
    """Returns a copy of `record` whose numbers have gone through `put`, typically onto a device.

    Numeric settings become float32, int32 or bool arrays first, so that every framework computes with the same values.
    Strings, formats and other static settings are kept. Does not validate again, which would synchronize with the
    device: the values were checked when `record` was built.
    """
    return with_values(record, {name: put(_as_leaf(value)) for name, value in numbers(record).items()})


def with_values(record: R, values: Mapping[str, Any]) -> R:
    """Returns a copy of `record` with `values` set as they are, past the checks of its constructor."""
    # `dataclasses.replace` runs `__post_init__`, whose comparisons would synchronize with a device or fail on a tracer.
    placed = copy.copy(record)
    for name, value in values.items():
        object.__setattr__(placed, name, value)
    return placed


def numbers(record: Any) -> dict[str, Any]:
    """Returns the fields of `record` that are numbers or arrays, by name; the others are static.

    A Python bool among the settings is static, as a rule may branch on it; a bool of a state is a leaf like any other.
    """
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    leaves = {field.name for field in fields(record) if "dtype" in field.metadata}
    static = bool | str | Format | None
    return {name: value for name, value in values.items() if name in leaves or not isinstance(value, static)}


def number_type(hint: Any) -> type | None:
    """Returns bool, int or float where a setting annotated with `hint` holds a number, and None where it does not."""
    options = _options(hint)
    return next((kind for kind in (float, int, bool) if kind in options), None)


def _options(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the one type that `hint` is."""
    return (hint,) if get_origin(hint) in (None, Literal) else get_args(hint)


def _as_leaf(value: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    return array if array.dtype.kind == "b" else array.astype(np.int32)


def plain(value: Any) -> Any:
    """Returns `value` as what JSON can hold: plain values, lists and dicts of them; infinity and NaN are strings."""
    if isinstance(value, Format):
        return value.name
    if isinstance(value, str | None):
        return value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    bare = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(bare, list | tuple):
        return [plain(item) for item in cast(list[Any], bare)]
    return str(bare) if isinstance(bare, float) and not math.isfinite(bare) else bare


def _checked_body(cls: type, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `mapping` without its header; raises if the header or the set of keys is wrong."""
    if not isinstance(mapping, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"`{cls.__name__}.from_dict` takes a mapping. Received: {type(mapping).__name__}.")
    body = dict(mapping)
    for key, expected in (("schema", SCHEMA), ("kind", cls.__name__)):
        if key not in body:
            raise ValueError(
                f"A saved {cls.__name__} carries the key {key!r}. Received keys: {shown_keys(body)}. "
                "Another system's state is read by `gradscale.import_state`."
            )
        if body[key] != expected:
            raise ValueError(
                f"{cls.__name__} reads {key} {expected!r}. Received: {short(body[key])}. "
                "Load it with the version of gradscale, and the class, that wrote it."
            )
        del body[key]
    expected = {field.name for field in fields(cls)}
    if missing := sorted(expected - body.keys()):
        raise ValueError(f"A saved {cls.__name__} needs every key. Missing: {missing}. {OTHER_KEYS}")
    if unknown := body.keys() - expected:
        raise ValueError(
            f"A saved {cls.__name__} has no such key: {shown_keys(unknown)}. Expected: {sorted(expected)}. {OTHER_KEYS}"
        )
    return body


def _read(cls: type, field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """Returns one value of a dict in the type of its field."""
    name = f"{cls.__name__}.{field.name}"
    if "dtype" in field.metadata:
        return _read_leaf(name, field.metadata["dtype"], field.metadata["signed"], value)
    if value is None and type(None) in _options(hint):
        return None
    if kind := number_type(hint):
        return _read_leaf(name, {float: "float64", int: "int64", bool: "bool"}[kind], True, value, scalar_type=kind)
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a string. Received: {shown(value)}.")
    if get_origin(hint) is Literal and value not in get_args(hint):
        raise ValueError(f"`{name}` must be one of {list(get_args(hint))}. Received: {short(value)}.")
    return get_format(value) if Format in _options(hint) else value


def _read_leaf(name: str, dtype: str, signed: bool, value: Any, scalar_type: type | None = None) -> Any:
    """Returns numbers of a dict as an array of `dtype`, or as a Python scalar of `scalar_type` where there is one."""
    items = cast(list[Any], value) if isinstance(value, list) else [value]
    read = [_read_number(name, np.dtype(dtype).kind, item) for item in items]
    if not signed and any(item < 0 for item in read):
        raise ValueError(f"`{name}` must not be negative. Received: {short(value)}.")
    array = np.asarray(read, dtype=_dtype_that_holds(name, dtype, read))
    if isinstance(value, list):
        return array
    return array[0] if scalar_type is None else scalar_type(array[0])


def _read_number(name: str, kind: str, value: Any) -> float | int | bool:
    """Returns one number of a dict, whose JSON type must fit the leaf's `kind`."""
    if kind == "f" and value == "inf":
        return math.inf
    expected = {"b": (bool,), "i": (int,), "f": (int, float)}[kind]
    if not isinstance(value, expected) or (kind != "b" and isinstance(value, bool)):
        wanted = {"b": "a bool", "i": "an integer", "f": "a number"}[kind]
        raise TypeError(f"`{name}` must be {wanted}. Received: {shown(value)}.")
    if value != value:
        raise ValueError(f"`{name}` must not be NaN. Received: {value!r}. The file it came from is damaged.")
    if kind == "f" and isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"`{name}` must fit float64. Received an integer of {value.bit_length()} bits.")
    return value


def _dtype_that_holds(name: str, dtype: str, values: list[Any]) -> str:
    """Returns `dtype`, or float64 for a float leaf with a value that float32 would change.

    Raises:
        ValueError: an integer does not fit `dtype`.
    """
    if np.dtype(dtype).kind == "i" and any(abs(value) > np.iinfo(dtype).max for value in values):
        raise ValueError(f"`{name}` must fit {dtype}. Received: {short(values)}.")
    if dtype != "float32":
        return dtype
    with np.errstate(over="ignore"):
        return dtype if all(float(np.float32(value)) == value for value in values) else "float64"
