"""Settings and numbers as text, for `repr` and messages: no longer than what a user would write."""

import dataclasses
import math
from contextlib import suppress
from typing import Any

import numpy as np

from gradscale._shown import short
from gradscale.formats import Format

PLAIN = bool | int | float | str | Format | None
"""What is compared with a default. Arrays are not: that has many answers, or synchronizes."""

LONGEST = 7
"""Characters of a power of two that is written in decimals, such as 65536.0 and 0.03125."""


def number_text(value: Any) -> str:
    """Returns a number as a user would write it: long powers of two as powers, float32 numbers without their tail.

    A string, which stands for a number that is not in host memory, is returned as it is; other values are cut short.

    >>> number_text(2.0**-24), number_text(1024.0), number_text(float(np.float32(0.002)))
    ('2**-24', '1024.0', '0.002')
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, float) or not math.isfinite(value):
        return short(value)
    text = repr(float(value))
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and len(text) > LONGEST:
        return f"2**{exponent - 1}"
    # Settings are rounded to float32, and Python shows all digits of the rounded one.
    single = str(np.float32(value)) if abs(value) <= np.finfo(np.float32).max else text
    return single if float(np.float32(single)) == value and len(single) < len(text) else text


def settings_text(record: Any) -> str:
    """Returns a dataclass with the settings that are not the default, as it would be written.

    >>> from gradscale.policies.dynamic import Dynamic
    >>> settings_text(Dynamic(growth_interval=100, min_scale=2.0**-24))
    'Dynamic(growth_interval=100, min_scale=2**-24)'
    """
    fields = [field for field in dataclasses.fields(record) if field.init]
    values = {field.name: getattr(record, field.name) for field in fields}
    missing = dataclasses.MISSING
    required = [field.name for field in fields if field.default is missing and field.default_factory is missing]
    usual: Any = None
    if all(isinstance(values[name], PLAIN) for name in required):
        with suppress(TypeError, ValueError):  # what is required may not fit the defaults
            # As settings are rounded and converted when a policy is made, so are its defaults.
            usual = type(record)(**{name: values[name] for name in required})
    changed = [name for name in values if name in required or usual is None or not _same(record, usual, name)]
    return f"{type(record).__name__}({', '.join(f'{name}={_value(values[name])}' for name in changed)})"


def _same(record: Any, usual: Any, name: str) -> bool:
    value = getattr(record, name)
    return isinstance(value, PLAIN) and value == getattr(usual, name)


def _value(value: Any) -> str:
    if isinstance(value, Format):
        return value.name
    return short(value) if isinstance(value, str) else number_text(value)
