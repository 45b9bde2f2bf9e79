"""What users of other loss scalers are told: what their names for methods, settings and arguments are called here."""

import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from gradscale._text import did_you_mean, short
from gradscale.peers.specs import POLICIES

F = TypeVar("F", bound=Callable[..., Any])

MEANINGS: Mapping[str, tuple[str, ...]] = {
    "update": ("update", "update_scale", "adjust", "wait_and_update"),
    "unscale": ("unscale", "unscale_", "unscale_gradients", "get_unscaled_gradients"),
    "scale of a loss": ("scale_loss", "get_scaled_loss"),
    "scale": ("get_scale", "get_loss_scale", "loss_scale", "cur_scale", "current_scale", "dynamic_scale"),
    "step": ("step", "apply", "apply_gradients"),
    "backward": ("backward", "value_and_grad"),
    "clip": ("clip_grad_norm", "clip_grad_norm_", "clip_master_grads"),
    "overflow": ("has_overflow", "check_overflow", "launch_check_overflow", "overflow", "found_inf"),
    "enabled": ("is_enabled", "enabled"),
    "setting": (
        *("get_growth_factor", "get_backoff_factor", "get_growth_interval"),
        *("growth_factor", "backoff_factor", "growth_interval", "init_scale", "initial_scale"),
        *("scale_factor", "scale_window", "min_scale", "max_scale", "dynamic"),
    ),
    "new setting": ("set_growth_factor", "set_backoff_factor", "set_growth_interval", "set_scale"),
    "save": ("state_dict", "to_dict", "get_config"),
    "load": ("load_state_dict", "from_dict", "load_state"),
    "of LossScaler": ("unscaled", "grad", "closure", "guard", "protect_buffers", "policy"),
}
"""What is meant, and the names that torch, apex, DeepSpeed, Megatron, Keras, tf-keras, MXNet, jmp and flax have for it.

A name that a scaler has itself is never looked up.
"""


def _answers(step: str, clip: str, other: str, /, **own: str) -> Mapping[str, str]:
    """Returns the answers of an adapter by what is meant: its `own`, and those that adapters share."""
    return {
        "update": f"`{step}` updates the scale as well. Remove the call.",
        "scale of a loss": "Use `scaler.scale(loss)`.",
        "step": f"Use `{step}`.",
        "clip": f"Use `{clip}`, which clips the unscaled gradients.",
        "overflow": "`step` returns a result: `result.skipped()` says whether there was one, "
        "`result.culprits()` where.",
        "enabled": "Use `bool(scaler.policy.needs)`. A scaler that is off has the policy `NoScaling()`.",
        "setting": "The settings of the scale are those of its policy, `scaler.policy`.",
        "new setting": f"A policy does not change. Make another {other}.",
        "save": "Use `scaler.state_dict()`.",
        "load": "Use `scaler.load_state_dict(...)`.",
    } | {meaning.replace("_", " "): answer for meaning, answer in own.items()}


ANSWERS: Mapping[str, Mapping[str, str]] = {
    "torch": _answers(
        "scaler.step(optimizer)",
        "scaler.step(optimizer, clip_norm=1.0)",
        "scaler, such as `LossScaler(model, policy=Dynamic(growth_interval=100))`",
        unscale="`scaler.step(optimizer, clip_norm=1.0)` unscales the gradients, and clips them. To read or "
        "edit unscaled gradients before it, use `with scaler.unscaled(optimizer):`.",
        scale_of_a_loss="Use `scaler.backward(loss)`, or `scaler.scale(loss).backward()`.",
        scale="Use `scaler.loss_scale`, a tensor, or `scaler.metrics()['scale']`, which does not synchronize.",
        backward="Use `scaler.backward(loss)`.",
    ),
    "torch drop-in": _answers(
        "scaler.step(optimizer)",
        "scaler.step(optimizer, clip_norm=1.0)",
        "scaler",
        update="Use `scaler.update()`.",
        unscale="Use `scaler.unscale_(optimizer)`.",
        scale_of_a_loss="Use `scaler.scale(loss).backward()`.",
        scale="Use `scaler.get_scale()`, which synchronizes, or `scaler.metrics()['scale']`, which does not.",
        backward="Use `scaler.backward(loss)`, or `scaler.scale(loss).backward()`.",
        overflow="Use `scaler.last.skipped()` and `scaler.last.culprits()`, after `step`.",
        enabled="Use `scaler.is_enabled()`.",
        setting="Use `scaler.get_growth_factor()`, `get_backoff_factor()` and `get_growth_interval()`.",
        new_setting="Use `scaler.update(new_scale)` to set the scale.",
        of_LossScaler="`gradscale.torch.LossScaler` has it; this class has the names of torch's.",
    ),
    "jax": _answers(
        "gradscale.jax.apply(tx, grads, opt_state, params, result)",
        "gradscale.jax.value_and_grad(fun, clip_norm=1.0)",
        "scaler, such as `Scaler(Dynamic(growth_interval=100))`",
        update="A scaler is immutable: `value_and_grad` and `scaler.step` return the next one.",
        unscale="`gradscale.jax.value_and_grad` returns unscaled gradients; `scaler.step(grads)` unscales those "
        "of a loss that was multiplied by the scale.",
        scale="Use `scaler.loss_scale`, an array.",
        backward="Use `gradscale.jax.value_and_grad(fun)(scaler, params, batch)`.",
        save="Use `scaler.to_dict()`.",
        load="Use `Scaler.from_dict(...)`.",
    ),
    "keras": {
        "update": "`apply`, which `fit` calls, updates the scale as well. Remove the call.",
        "unscale": "`apply` takes scaled gradients. `optimizer.unscale_gradients(grads)` returns them unscaled.",
        "scale of a loss": "Use `optimizer.scale_loss(loss)`.",
        "scale": "Use `optimizer.dynamic_scale`, a variable, or `float(optimizer.state.scale)`.",
        "step": "Use `optimizer.apply(grads, variables)`, or `apply_if_finite`, which returns a result.",
        "backward": "Differentiate `optimizer.scale_loss(loss)`, and give the gradients to `optimizer.apply`.",
        "clip": "Clip in the inner optimizer, as in `Adam(global_clipnorm=1.0)`: it sees unscaled gradients.",
        "overflow": "`apply_if_finite` returns a result, with `result.skipped()`. In `fit` use `ScaleMonitor`.",
        "enabled": "Use `bool(optimizer.policy.needs)`. One that does not scale has the policy `NoScaling()`.",
        "setting": "The settings of the scale are those of its policy, `optimizer.policy`.",
        "new setting": "A policy does not change. Make another optimizer, with another `policy`.",
        "save": "Keras saves it with the model; `optimizer.state` is the state of the scale.",
        "load": "Keras loads it with the model; `optimizer.load_state(state)` continues from a state.",
    },
    "mxnet": _answers(
        "trainer.step(batch_size)",
        "init_trainer(trainer, clip_norm=1.0)",
        "trainer, and give another policy to `init_trainer`",
        unscale="`trainer.step(batch_size)` unscales the gradients. To read or edit them before it, use "
        "`gradscale.mxnet.unscale(trainer)`.",
        scale_of_a_loss="Use `with gradscale.mxnet.scale_loss(loss, trainer) as scaled:`.",
        scale="Use `scaler.loss_scale`, a number.",
        backward="Use `with scale_loss(loss, trainer) as scaled: autograd.backward(scaled)`.",
        overflow="`scaler.last` is the result of the last step: `scaler.last.skipped()`, and `culprits()`.",
    ),
    "numpy": _answers(
        "scaler.step(grads)",
        "scaler.step(grads, clip_norm=1.0)",
        "scaler, such as `LossScaler(Dynamic(growth_interval=100))`",
        unscale="`scaler.step(grads)` returns unscaled gradients, as `result.grads`.",
        scale="Use `scaler.loss_scale`, a number.",
        backward="Differentiate `scaler.scale(loss)`, and give the gradients to `scaler.step(grads)`.",
    ),
}
"""What to use instead, by adapter and by what is meant."""


def _by_name(meanings: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {name: meaning for meaning, names in meanings.items() for name in names}


OF_RESULT: Mapping[str, str] = _by_name(
    {
        "Use `result.skipped()`, and `result.culprits()` for where it was.": (
            *MEANINGS["overflow"],
            *("found_infs", "is_overflow", "overflowed", "inf"),
        ),
        "Use `result.applied`, a flag on the device, or `not result.skipped()`.": (
            *("finite", "is_finite", "all_finite", "grads_finite", "is_fin", "success", "updated"),
        ),
        "Use `result.grad_norm`: unscaled, before clipping, and measured with `clip_norm` or `norm=True`.": (
            *("norm", "total_norm", "global_norm", "global_grad_norm"),
        ),
        "Use `result.scale`, or `result.next_scale`.": MEANINGS["scale"],
    }
)
"""Names for the result of a step, and what to use instead: the same on every adapter."""

OTHER_SETTINGS: Mapping[str, str] = {
    name: name for name in inspect.signature(POLICIES["dynamic"]).parameters
} | _by_name(
    {
        "init_scale": ("initial_scale", "initial_loss_scale"),
        "growth_factor": ("scale_factor", "factor"),
        "growth_interval": ("scale_window", "loss_scale_window", "dynamic_growth_steps", "period"),
        "min_scale": ("min_loss_scale", "minimum_scale"),
        "max_scale": ("max_loss_scale",),
        "hysteresis": ("delayed_shift",),
    }
)
"""Settings as torch, apex, DeepSpeed, Megatron, Keras, jmp and flax call them, and as `Dynamic` does."""

OTHER_ARGUMENTS: Mapping[str, str] = _by_name(
    {
        "clip_norm": (
            *("max_norm", "max_grad_norm", "clip", "clip_grad", "clip_grad_norm", "clipnorm", "global_clipnorm"),
            *("gradient_clipping", "gradient_clip_val"),
        ),
        "clip_value": ("clipvalue", "clip_grad_value"),
    }
)
"""Arguments of a step as torch, DeepSpeed, Megatron, Keras and Lightning call them, and as gradscale does."""

_MEANING_OF = _by_name(MEANINGS)

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

_OF_POLICIES = {
    setting: name
    for name, kind in POLICIES.items()
    for setting in inspect.signature(kind).parameters
    if name != "static"
}


class OtherNames:
    """Gives a class answers to names that other loss scalers have, in the text of the `AttributeError`.

    `hasattr`, `getattr` with a default, copies and pickles are as without it, and so is what a type checker knows.
    """

    __slots__ = ()

    _adapter: ClassVar[str] = ""
    """Key of `ANSWERS`; a class without one answers as Python does."""

    @classmethod
    def _answer(cls, name: str) -> str | None:
        """Returns what to use instead of `name`, or None where nothing is known of it."""
        return ANSWERS.get(cls._adapter, {}).get(_MEANING_OF.get(name, ""))

    if not TYPE_CHECKING:  # a type checker would take any name for known

        def __getattr__(self, name: str) -> Any:
            kind = type(self)
            if hasattr(kind, name):  # a property that failed: its own error, not that of a missing name
                return object.__getattribute__(self, name)
            answer = kind._answer(name)
            text = f"{kind.__name__!r} object has no attribute {name!r}"
            raise AttributeError(text if answer is None else f"{text}. {answer}", name=name, obj=self)


def explains_arguments(call: str) -> Callable[[F], F]:
    """Returns a decorator for a function: its `TypeError` about a keyword that it does not have says which is meant.

    `call` is the function's name, or how it is called with a policy, with `{}` in its place: settings of the scale are
    then answered with the policy that has them. Where nothing is known of a keyword, the function is called, and
    refuses it itself. The signature stays as it is.
    """

    def decorator(function: F) -> F:
        parameters = inspect.signature(function).parameters.items()
        known = frozenset(name for name, one in parameters if one.kind in _NAMED and name != "self")

        @wraps(function)
        def explained(*args: Any, **kwargs: Any) -> Any:
            if unknown := {name: value for name, value in kwargs.items() if name not in known}:
                if text := _explanation(call, unknown, known):
                    raise TypeError(text)
            return function(*args, **kwargs)

        return explained  # type: ignore[return-value]

    return decorator


def unknown_arguments(call: str, function: Callable[..., Any], unknown: Mapping[str, Any]) -> TypeError:
    """Returns the error about keywords that `function`, shown as `call`, takes as `**unknown` to answer them."""
    by_name = inspect.Parameter.KEYWORD_ONLY
    known = [name for name, one in inspect.signature(function).parameters.items() if one.kind is by_name]
    text = _explanation(call, unknown, known)
    return TypeError(text or f"{function.__name__}() got an unexpected keyword argument {next(iter(unknown))!r}")


def _explanation(call: str, unknown: Mapping[str, Any], known: Collection[str]) -> str:
    """Returns what is said about keywords that a function does not have; nothing where nothing is known of them."""
    function = call.partition("(")[0]
    names = {*OTHER_SETTINGS, *_OF_POLICIES, "enabled", "loss_scale", "initial_scale_power"} if "{}" in call else ()
    if settings := {name: value for name, value in unknown.items() if name in names}:
        received = ", ".join(f"{name}={short(value)}" for name, value in settings.items())
        text = f"`{function}` takes the settings of the scale as a policy. Received: {received}."
        enabled = settings.pop("enabled", None)
        if policy := "NoScaling()" if enabled is not None and not enabled else _policy(settings):
            return f"{text} Use `{call.format(policy)}`."
        return f"{text} Leave `enabled` out; to switch scaling off use `{call.format('NoScaling()')}`."
    for name, value in unknown.items():
        meant = OTHER_ARGUMENTS.get(name) or OTHER_SETTINGS.get(name)
        if hint := f" Use `{meant}={short(value)}`." if meant in known else did_you_mean(name, known):
            return f"`{function}` has no argument {name!r}. Received: {name}={short(value)}.{hint}"
    return ""


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
    settings = {translated.get(name, name): short(value) for name, value in given.items()}
    if "initial_scale_power" in given:
        settings["init_scale"] = f"2**{short(given['initial_scale_power'])}"
    known = inspect.signature(POLICIES[kind]).parameters
    written = ", ".join(f"{name}={settings[name]}" for name in known if name in settings)
    return f"{POLICIES[kind].__name__}({written})"


ADAPTERS = ("torch", "jax", "keras", "mxnet", "numpy")
"""In the order in which they are named."""


def refuse_name(name: str, known: Iterable[str]) -> NoReturn:
    """Raises an `AttributeError` about a name that `gradscale` does not have: which adapter has it, or the nearest.

    In the statement `from gradscale import name` it is an `ImportError` where an adapter has it. Loads no framework.
    """
    text = f"module 'gradscale' has no attribute {name!r}."
    if name in ADAPTERS:
        raise AttributeError(f"{text} Import it first: `import gradscale.{name}`.", name=name)
    adapters = [] if name.startswith("_") else [adapter for adapter in ADAPTERS if name in _public(adapter)]
    if not adapters:
        raise AttributeError(text + did_you_mean(name, known), name=name)
    text += f" Use `from gradscale.{adapters[0]} import {name}`"
    others = " or ".join(f"`gradscale.{adapter}`" for adapter in adapters[1:])
    text += f", or that of {others}." if others else "."
    # The statement asks importlib first, then replaces an AttributeError with an error of its own, without this text.
    if sys._getframe(2).f_globals.get("__name__") == "importlib._bootstrap":  # pyright: ignore[reportPrivateUsage]
        raise ImportError(text, name="gradscale")
    raise AttributeError(text, name=name)


@cache
def _public(adapter: str) -> tuple[str, ...]:
    """Returns the public names of an adapter, read from its source: to import it would load its framework."""
    try:
        source = (pkgutil.get_data("gradscale", f"{adapter}/__init__.py") or b"").decode()
    except OSError:  # installed without sources
        return ()
    return tuple(re.findall(r'"(\w+)"', source.partition("__all__")[2]))
