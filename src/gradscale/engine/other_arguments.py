"""Keywords that a function does not have, as other loss scalers name them or misspelt, and what to write instead."""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, TypeVar

from gradscale._nearest import did_you_mean
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

OTHER_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "max_norm": "clip_norm",
        "max_grad_norm": "clip_norm",
        "clip": "clip_norm",
        "clip_grad": "clip_norm",
        "clip_grad_norm": "clip_norm",
        "clipnorm": "clip_norm",
        "global_clipnorm": "clip_norm",
        "gradient_clipping": "clip_norm",
        "gradient_clip_val": "clip_norm",
        "clipvalue": "clip_value",
        "clip_grad_value": "clip_value",
    }
)
"""Arguments of a step as torch, DeepSpeed, Megatron, Keras and Lightning call them, and as gradscale does."""

_OF_POLICIES = {
    setting: name
    for name, kind in POLICIES.items()
    for setting in inspect.signature(kind).parameters
    if name != "static"
}


def explains_settings(call: str) -> Callable[[F], F]:
    """Returns a decorator for a function with a `policy`: its `TypeError` about a setting says which policy has it.

    `call` is how the function is called with a policy, with `{}` in its place. About other keywords that the function
    does not have it says what `explains_arguments` does. The signature stays as it is.
    """
    function = call.partition("(")[0]

    def text_of(unknown: Mapping[str, Any], known: Collection[str]) -> str:
        settings = {name: value for name, value in unknown.items() if _is_setting(name)}
        return _explanation(call, settings) if settings else _argument_text(function, unknown, known)

    return lambda decorated: _explained(decorated, text_of)


def explains_arguments(function: str) -> Callable[[F], F]:
    """Returns a decorator for a function of that name: its `TypeError` about a keyword says which one is meant.

    Where that is not known, the function is called, and refuses the keyword itself. The signature stays as it is.
    """
    return lambda decorated: _explained(decorated, partial(_argument_text, function))


def _explained(function: F, text_of: Callable[[Mapping[str, Any], Collection[str]], str]) -> F:
    """Returns a function that raises with the text about keywords which `function` does not have, if there is one."""
    parameters = inspect.signature(function).parameters
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = frozenset(name for name, one in parameters.items() if one.kind in by_name and name != "self")

    @wraps(function)
    def explained(*args: Any, **kwargs: Any) -> Any:
        if unknown := {name: value for name, value in kwargs.items() if name not in known}:
            text = text_of(unknown, known)
            if text:
                raise TypeError(text)
        return function(*args, **kwargs)

    return explained  # type: ignore[return-value]


def _argument_text(function: str, unknown: Mapping[str, Any], known: Collection[str]) -> str:
    """Returns the text about the first of these keywords for which a known one is meant, or nothing."""
    for name, value in unknown.items():
        meant = OTHER_ARGUMENTS.get(name) or OTHER_SETTINGS.get(name)
        hint = f" Use `{meant}={short(value)}`." if meant in known else did_you_mean(name, known)
        if hint:
            return f"`{function}` has no argument {name!r}. Received: {name}={short(value)}.{hint}"
    return ""


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
