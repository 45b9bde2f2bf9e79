"""Names that other loss scalers have for what a scaler of gradscale does, and what to use here: one table."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

MEANINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
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
)
"""What is meant, and the names that torch, apex, DeepSpeed, Megatron, Keras, tf-keras, MXNet, jmp and flax have for it.

A name that a scaler has itself is never looked up.
"""

_OF_EVERY_SCALER = {
    "overflow": "`step` returns a result: `result.skipped()` says whether there was one, `result.culprits()` where.",
    "enabled": "Use `bool(scaler.policy.needs)`. A scaler that is off has the policy `NoScaling()`.",
    "setting": "The settings of the scale are those of its policy, `scaler.policy`.",
    "save": "Use `scaler.state_dict()`.",
    "load": "Use `scaler.load_state_dict(...)`.",
}

ANSWERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "torch": _OF_EVERY_SCALER
        | {
            "update": "`scaler.step(optimizer)` updates the scale as well. Remove the call.",
            "unscale": "`scaler.step(optimizer, clip_norm=1.0)` unscales the gradients, and clips them. To read or "
            "edit unscaled gradients before it, use `with scaler.unscaled(optimizer):`.",
            "scale of a loss": "Use `scaler.backward(loss)`, or `scaler.scale(loss).backward()`.",
            "scale": "Use `scaler.loss_scale`, a tensor, or `scaler.metrics()['scale']`, which does not synchronize.",
            "step": "Use `scaler.step(optimizer)`.",
            "backward": "Use `scaler.backward(loss)`.",
            "clip": "Use `scaler.step(optimizer, clip_norm=1.0)`, which clips the unscaled gradients.",
            "new setting": "A policy does not change. Make another scaler, such as "
            "`LossScaler(model, policy=Dynamic(growth_interval=100))`.",
        },
        "torch drop-in": {
            "update": "Use `scaler.update()`.",
            "unscale": "Use `scaler.unscale_(optimizer)`.",
            "scale of a loss": "Use `scaler.scale(loss).backward()`.",
            "scale": "Use `scaler.get_scale()`, which synchronizes, or `scaler.metrics()['scale']`, which does not.",
            "step": "Use `scaler.step(optimizer)`.",
            "backward": "Use `scaler.backward(loss)`, or `scaler.scale(loss).backward()`.",
            "clip": "Call `scaler.unscale_(optimizer)`, then `torch.nn.utils.clip_grad_norm_`.",
            "overflow": "Use `scaler.last.skipped()` and `scaler.last.culprits()`, after `step`.",
            "enabled": "Use `scaler.is_enabled()`.",
            "setting": "Use `scaler.get_growth_factor()`, `get_backoff_factor()` and `get_growth_interval()`.",
            "new setting": "Use `scaler.update(new_scale)` to set the scale.",
            "save": "Use `scaler.state_dict()`.",
            "load": "Use `scaler.load_state_dict(...)`.",
            "of LossScaler": "`gradscale.torch.LossScaler` has it; this class has the names of torch's.",
        },
        "jax": _OF_EVERY_SCALER
        | {
            "update": "A scaler is immutable: `value_and_grad` and `scaler.step` return the next one.",
            "unscale": "`gradscale.jax.value_and_grad` returns unscaled gradients; `scaler.step(grads)` unscales those "
            "of a loss that was multiplied by the scale.",
            "scale of a loss": "Use `scaler.scale(loss)`.",
            "scale": "Use `scaler.loss_scale`, an array.",
            "step": "Use `gradscale.jax.apply(tx, grads, opt_state, params, result)`.",
            "backward": "Use `gradscale.jax.value_and_grad(fun)(scaler, params, batch)`.",
            "clip": "Use `gradscale.jax.value_and_grad(fun, clip_norm=1.0)`, which clips the unscaled gradients.",
            "new setting": "A policy does not change. Make another scaler, such as "
            "`Scaler(Dynamic(growth_interval=100))`.",
            "save": "Use `scaler.to_dict()`.",
            "load": "Use `Scaler.from_dict(...)`.",
        },
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
        "mxnet": _OF_EVERY_SCALER
        | {
            "update": "`trainer.step(batch_size)` updates the scale as well. Remove the call.",
            "unscale": "`trainer.step(batch_size)` unscales the gradients. To read or edit them before it, use "
            "`gradscale.mxnet.unscale(trainer)`.",
            "scale of a loss": "Use `with gradscale.mxnet.scale_loss(loss, trainer) as scaled:`.",
            "scale": "Use `scaler.loss_scale`, a number.",
            "step": "Use `trainer.step(batch_size)`.",
            "backward": "Use `with scale_loss(loss, trainer) as scaled: autograd.backward(scaled)`.",
            "clip": "Use `init_trainer(trainer, clip_norm=1.0)`, which clips the unscaled gradients.",
            "overflow": "`scaler.last` is the result of the last step: `scaler.last.skipped()`, and `culprits()`.",
            "new setting": "A policy does not change. Make another trainer, and give another policy to `init_trainer`.",
        },
        "numpy": _OF_EVERY_SCALER
        | {
            "update": "`scaler.step(grads)` updates the scale as well. Remove the call.",
            "unscale": "`scaler.step(grads)` returns unscaled gradients, as `result.grads`.",
            "scale of a loss": "Use `scaler.scale(loss)`.",
            "scale": "Use `scaler.loss_scale`, a number.",
            "step": "Use `scaler.step(grads)`.",
            "backward": "Differentiate `scaler.scale(loss)`, and give the gradients to `scaler.step(grads)`.",
            "clip": "Use `scaler.step(grads, clip_norm=1.0)`, which clips the unscaled gradients.",
            "new setting": "A policy does not change. Make another scaler, such as "
            "`LossScaler(Dynamic(growth_interval=100))`.",
        },
    }
)
"""What to use instead, by adapter and by what is meant."""

_OVERFLOW_OF_RESULT = "Use `result.skipped()`, and `result.culprits()` for where it was."
_APPLIED = "Use `result.applied`, a flag on the device, or `not result.skipped()`."
_NORM = "Use `result.grad_norm`: unscaled, before clipping, and measured with `clip_norm` or `norm=True`."

OF_RESULT: Mapping[str, str] = MappingProxyType(
    {name: _OVERFLOW_OF_RESULT for name in (*MEANINGS["overflow"], "found_infs", "is_overflow", "overflowed", "inf")}
    | {name: _APPLIED for name in ("finite", "is_finite", "all_finite", "grads_finite", "is_fin", "success", "updated")}
    | {name: _NORM for name in ("norm", "total_norm", "global_norm", "global_grad_norm")}
    | {name: "Use `result.scale`, or `result.next_scale`." for name in MEANINGS["scale"]}
)
"""Names for the result of a step, and what to use instead: the same on every adapter."""

_MEANING_OF = {name: meaning for meaning, names in MEANINGS.items() for name in names}


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
