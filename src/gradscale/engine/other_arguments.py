"""Settings of the scale given to a scaler by keyword, as other loss scalers take them, and the policy that has them."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar

from gradscale._shown import short
from gradscale.peers.specs import POLICIES

F = TypeVar("F", bound=Callable[..., Any])

DYNAMIC = inspect.signature(POLICIES["dynamic"]).parameters

OTHER_SETTINGS: Mapping[str, str] = MappingProxyType(
    {name: name for name in DYNAMIC}
    | {
        "initial_scale": "init_scale",
        "initial_loss_scale": "init_scale",
        "scale_factor": "growth_factor",
        "factor": "growth_factor",
        "scale_window": "growth_interval",
        "loss_scale_window": "growth_interval",
        "dynamic_growth_steps": "growth_interval",
        "period": "growth_interval",
        "min_loss_scale": "min_scale",
        "minimum_scale": "min_scale",
        "max_loss_scale": "max_scale",
        "delayed_shift": "hysteresis",
    }
)
"""Settings as torch, apex, DeepSpeed, Megatron, Keras, jmp and flax call them, and as `Dynamic` does."""

_OF_POLICIES = {
    setting: name
    for name, kind in POLICIES.items()
    for setting in inspect.signature(kind).parameters
    if name != "static"
}


def explains_settings(call: str) -> Callable[[F], F]:
    """Returns a decorator for a function with a `policy`: its `TypeError` about a setting says which policy has it.

    `call` is how the function is called with a policy, with `{}` in its place. The signature stays as it is.
    """

    def decorate(function: F) -> F:
        taken = inspect.signature(function).parameters

        @wraps(function)
        def explained(*args: Any, **kwargs: Any) -> Any:
            others = {name: value for name, value in kwargs.items() if name not in taken and _is_setting(name)}
            if others:
                raise TypeError(_explanation(call, others))
            return function(*args, **kwargs)

        return explained  # type: ignore[return-value]

    return decorate


def _is_setting(name: str) -> bool:
    return name in OTHER_SETTINGS or name in _OF_POLICIES or name in ("enabled", "loss_scale", "initial_scale_power")


def _explanation(call: str, given: Mapping[str, Any]) -> str:
    received = ", ".join(f"{name}={short(value)}" for name, value in given.items())
    function = call.partition("(")[0]
    text = f"`{function}` takes the settings of the scale as a policy. Received: {received}."
    switched_off = "enabled" in given and not given["enabled"]
    policy = "NoScaling()" if switched_off else _policy({name: given[name] for name in given if name != "enabled"})
    if policy:
        text += f" Use `{call.format(policy)}`."
    elif "enabled" in given:
        text += f" Leave `enabled` out; to switch scaling off use `{call.format('NoScaling()')}`."
    return text


def _policy(given: Mapping[str, Any]) -> str:
    """Returns the policy with these settings as it would be written, or nothing where there are none."""
    if not given:
        return ""
    fixed = given.get("loss_scale")
    if isinstance(fixed, int | float) and not isinstance(fixed, bool) and fixed:  # 0 is DeepSpeed's dynamic
        return f"Static({short(fixed)})"
    kinds = {_OF_POLICIES[name] for name in given if name not in OTHER_SETTINGS and name in _OF_POLICIES}
    kind = min(kinds, default="dynamic")
    translated: Mapping[str, str] = {} if kinds else OTHER_SETTINGS
    known = inspect.signature(POLICIES[kind]).parameters
    settings = {translated.get(name, name): short(value) for name, value in given.items()}
    if "initial_scale_power" in given:
        settings["init_scale"] = f"2**{short(given['initial_scale_power'])}"
    written = ", ".join(f"{name}={settings[name]}" for name in known if name in settings)
    return f"{POLICIES[kind].__name__}({written})"
