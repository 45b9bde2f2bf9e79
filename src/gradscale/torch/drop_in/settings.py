"""The settings of `GradScaler`: its rule, its bounds and its scales, checked before anything is changed."""

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscale._shown import short
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE, check_count, check_number, check_scale
from gradscale.policies.contract import Policy
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.static import multiplies

TORCH_DEFAULTS = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}

LARGEST_INTERVAL = 2**63 - 1  # what torch's kernel takes


@dataclass(frozen=True, slots=True)
class Bounds:
    """The scales that are allowed.

    By default all that are normal float32 numbers with a normal reciprocal: a device may flush others to zero.
    """

    min_scale: float = LOWEST_SCALE
    max_scale: float = HIGHEST_SCALE

    def __post_init__(self) -> None:
        for name, value in (("min_scale", self.min_scale), ("max_scale", self.max_scale)):
            check_scale(name, value)
        if self.min_scale > self.max_scale:
            raise ValueError(
                "`min_scale` must not be above `max_scale`. "
                f"Received: min_scale={self.min_scale!r}, max_scale={self.max_scale!r}."
            )

    def checked(self, name: str, value: Any) -> float:
        """Returns `value` as a float, or raises if it is not a number within the bounds."""
        check_number(name, value)
        # Compared as it is: a Python integer may be too large for a float.
        if not self.min_scale <= value <= self.max_scale:
            raise ValueError(
                f"`{name}` must be from {self.min_scale:g} to {self.max_scale:g}, the bounds of the scale. "
                f"Received: {name}={shown(value)}."
            )
        return float(value)


@dataclass(frozen=True, slots=True)
class Settings:
    """The initial scale, and how it changes.

    Attributes:
        init_scale: scale of the first step.
        growth_factor: factor by which the scale is multiplied when it grows.
        backoff_factor: factor by which the scale is multiplied when it backs off.
        growth_interval: clean steps in a row before the scale grows.
        bounds: the scales that are allowed.
        policy: the rule; None for torch's own, which its kernel runs with the settings above.
    """

    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    bounds: Bounds
    policy: Policy | None

    def __post_init__(self) -> None:
        self.bounds.checked("init_scale", self.init_scale)
        check_factors(self.growth_factor, self.backoff_factor)
        check_interval(self.growth_interval)


def of_policy(policy: Policy) -> Settings:
    """Returns the settings of a scaler that follows `policy`.

    Policies other than `Dynamic` do not use torch's numbers, which keep their defaults.
    """
    numbers = dict(TORCH_DEFAULTS)
    if isinstance(policy, Dynamic):
        numbers = {name: getattr(policy, name) for name in TORCH_DEFAULTS}
    numbers["init_scale"] = float(policy.start().scale)
    return Settings(**numbers, bounds=bounds_of(policy), policy=policy)


def bounds_of(policy: Policy) -> Bounds:
    """Returns the bounds of a scale that `policy` moves: it has its own, and others may set any."""
    return Bounds() if multiplies(policy) else Bounds(1.0, 1.0)


def from_numbers(
    numbers: dict[str, Any], min_scale: float | None, max_scale: float | None, hysteresis: int
) -> Settings:
    """Returns the settings of a scaler given by torch's four numbers and the extra ones."""
    check_count("hysteresis", hysteresis)
    bounds = {"min_scale": min_scale, "max_scale": max_scale}
    given: dict[str, Any] = {name: value for name, value in bounds.items() if value is not None}
    if hysteresis == 1:
        return Settings(**numbers, bounds=Bounds(**given), policy=None)
    given = {"min_scale": LOWEST_SCALE, "hysteresis": hysteresis, **given}
    return of_policy(Dynamic(**numbers, **given))


def refuse_second_rule(given: dict[str, Any]) -> None:
    """Raises if `policy` is given together with other settings of the scale."""
    defaults = TORCH_DEFAULTS | {"min_scale": None, "max_scale": None, "hysteresis": 1}
    if clashing := [name for name, value in given.items() if value != defaults[name]]:
        raise ValueError(
            "`policy` has all settings of the scale. Received also: "
            f"{', '.join(f'{name}={given[name]!r}' for name in clashing)}. Give these to the policy."
        )


def check_factors(growth_factor: float, backoff_factor: float) -> None:
    """Raises unless growth raises and backoff lowers the scale."""
    # `AssertionError` and the text are torch's own; the checks that follow them are not in torch.
    check_number("growth_factor", growth_factor)
    check_number("backoff_factor", backoff_factor)
    if growth_factor <= 1.0:
        raise AssertionError("The growth factor must be > 1.0.")
    if backoff_factor >= 1.0:
        raise AssertionError("The backoff factor must be < 1.0.")
    if not growth_factor <= sys.float_info.max:
        raise ValueError(f"`growth_factor` must be finite. Received: growth_factor={shown(growth_factor)}.")
    if not backoff_factor > 0.0:
        raise ValueError(
            "`backoff_factor` must be greater than 0, so that the scale stays positive. "
            f"Received: backoff_factor={backoff_factor!r}."
        )


def check_number_of_rule(name: str, value: Any) -> None:
    """Raises unless `value` is valid for `name`: one of the two factors, or the interval."""
    if name == "growth_interval":
        check_interval(value)
    else:
        check_factors(**({"growth_factor": 2.0, "backoff_factor": 0.5} | {name: value}))


def changed(policy: Policy, name: str, value: Any) -> Policy:
    """Returns `policy` with `name` set to `value`, or raises if it has no such setting."""
    if isinstance(policy, Dynamic):
        return replace(policy, **{name: value})
    raise ValueError(
        f"The scale follows `{type(policy).__name__}`, which has no `{name}` to set. Received: {name}={value!r}. "
        "Build another scaler with another `policy`."
    )


def check_interval(growth_interval: int) -> None:
    """Raises unless `growth_interval` is a whole number from 1."""
    if isinstance(growth_interval, bool) or not isinstance(growth_interval, int | np.integer):
        raise TypeError(
            f"`growth_interval` must be an integer. Received: growth_interval={growth_interval!r} "
            f"({type(growth_interval).__name__})."
        )
    if growth_interval > LARGEST_INTERVAL:
        raise ValueError(f"`growth_interval` must be at most 2**63 - 1. Received: {shown(growth_interval)}.")
    if growth_interval < 1:
        raise ValueError(
            f"`growth_interval` must be at least 1. Received: growth_interval={growth_interval!r}. "
            "For a scale that does not grow, pass one that is larger than the number of steps."
        )


def check_device(device: Any) -> None:
    """Raises unless `device` may be the type of a device: torch takes anything here, and ignores it."""
    if isinstance(device, str | torch.device):
        return
    fix = "Leave it out."
    if isinstance(device, torch.optim.Optimizer):
        fix = "`scaler.step(optimizer)` takes the optimizer."
    elif isinstance(device, int | float):
        fix = f"Give a scale by name, as `init_scale={device!r}`."
    elif callable(getattr(device, "next", None)):
        fix = "Give a policy by name, as `policy=...`."
    elif isinstance(device, torch.nn.Module):
        fix = "Leave the model out, or use `gradscale.torch.LossScaler(model)`."
    raise TypeError(
        "`device`, the first argument of `GradScaler`, must be the type of a device, such as 'cuda'. "
        f"Received: {' '.join(short(device).split())}. {fix}"
    )


def text_of(scaler: Any) -> list[str]:
    """Returns the numbers of torch's rule that are not torch's defaults, as text."""
    present = {name: getattr(scaler, f"_{name}") for name in TORCH_DEFAULTS if name != "init_scale"}
    return [f"{name}={shown(value)}" for name, value in present.items() if value != TORCH_DEFAULTS[name]]


def shown(value: Any) -> str:
    """Returns a number as text; of a huge integer, which Python may refuse to print, its length."""
    huge = isinstance(value, int) and value.bit_length() > 1024
    return f"an integer of {value.bit_length()} bits" if huge else repr(value)


def checked_scale(new_scale: float | Tensor, device: str, bounds: Bounds) -> float:
    """Returns a scale that was given to `update`, or raises if it is no number within the bounds.

    Synchronizes with the device if it is a tensor there.
    """
    number = _number_from_tensor(new_scale, device) if isinstance(new_scale, Tensor) else new_scale
    # torch would take 0, inf or NaN, and scale by it from then on.
    return bounds.checked("new_scale", number)


def _number_from_tensor(new_scale: Tensor, device: str) -> float:
    """Returns the one number in the tensor, or raises what torch raises."""
    one_number = new_scale.device.type == torch.device(device).type and new_scale.numel() == 1
    if not one_number or new_scale.requires_grad:
        raise AssertionError(
            "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
            "torch.FloatTensor with requires_grad=False."
        )
    return float(new_scale)
