"""Checks of other systems' settings: refused where the system itself refuses them, or fails with them."""

import math

from gradscale.policies.checks import as_single, check_count, check_number


def _check_between(name: str, value: float, low: float, high: float, rule: str) -> None:
    check_number(name, value)
    if not low < value < high:
        raise ValueError(f"`{name}` must be {rule}. Received: {name}={value!r}.")


def check_positive(name: str, value: float) -> None:
    """Raises unless `value` is a finite number above zero."""
    _check_between(name, value, 0, math.inf, "positive and finite")


def check_growth(name: str, value: float) -> None:
    """Raises unless `value` is finite and greater than 1."""
    _check_between(name, value, 1, math.inf, "greater than 1 and finite")


def check_backoff(name: str, value: float) -> None:
    """Raises unless `value` lies between 0 and 1."""
    _check_between(name, value, 0, 1, "between 0 and 1")


def check_float32(name: str, value: float) -> None:
    """Raises unless `value` is positive and a float32 tensor can hold it, where it is neither 0 nor infinite."""
    check_positive(name, value)
    if not 0 < as_single(name, value) < math.inf:
        raise ValueError(f"`{name}` must fit a float32 tensor. Received: {name}={value!r}.")


def check_limit(name: str, value: float) -> None:
    """Raises unless `value` is a number from zero up, infinity included: a bound that may have no effect."""
    check_number(name, value)
    if not value >= 0:
        raise ValueError(f"`{name}` must not be negative or NaN. Received: {name}={value!r}.")


def whole(name: str, value: float) -> int:
    """Returns `value` as an integer from 1 up. Takes `1000.0` too, as systems that compare or divide in Python do."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    check_count(name, value)  # pyright: ignore[reportArgumentType]
    return int(value)


def check_kernel(init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int) -> None:
    """Raises unless these are settings that torch's `GradScaler` takes."""
    check_float32("init_scale", init_scale)
    check_growth("growth_factor", growth_factor)
    check_backoff("backoff_factor", backoff_factor)
    check_count("growth_interval", growth_interval)
