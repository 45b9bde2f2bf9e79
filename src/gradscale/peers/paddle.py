"""Paddle: `paddle.amp.GradScaler` and the `AmpScaler` under it."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from gradscale.peers._form import Form, values_of
from gradscale.peers._saved import Imported, Saved, check_not_disabled, started
from gradscale.peers._settings import Backoff, Count, Float32, Growth, checked
from gradscale.peers.ladder import Ladder
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import NoScaling, Static


@checked
def grad_scaler(
    enable: bool = True,
    init_loss_scaling: Float32 = 2.0**16,
    incr_ratio: Growth = 2.0,
    decr_ratio: Backoff = 0.5,
    incr_every_n_steps: Count = 2000,
    decr_every_n_nan_or_inf: Count = 1,
    use_dynamic_loss_scaling: bool = True,
) -> Ladder | Static | NoScaling:
    """Returns the rule of `GradScaler` in dynamic graphs: float32, without bounds.

    It backs off after `decr_every_n_nan_or_inf` overflows in a row, and then counts again from 0.
    """
    if not enable:
        return NoScaling()
    if not use_dynamic_loss_scaling:
        return Static(init_loss_scaling)
    # Paddle counts overflows up, and clears the count at a clean step and at a backoff: credits that both refill.
    return Ladder(
        init_scale=init_loss_scaling,
        growth_factor=incr_ratio,
        backoff_factor=decr_ratio,
        growth_interval=incr_every_n_steps,
        hysteresis=decr_every_n_nan_or_inf,
        refill="clean or backoff",
    )


amp_scaler = partial(grad_scaler, init_loss_scaling=2.0**15, incr_every_n_steps=1000)
"""The rule of `AmpScaler`: that of `GradScaler` with other defaults."""


_FORM = Form(
    "Paddle's GradScaler",
    grad_scaler,
    "scale",
    "incr_count",
    {
        "incr_ratio": "growth_factor",
        "decr_ratio": "backoff_factor",
        "incr_every_n_steps": "growth_interval",
        "decr_every_n_nan_or_inf": "hysteresis",
    },
)
_COUNT, _DYNAMIC = "decr_count", "use_dynamic_loss_scaling"


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of a `state_dict()`; the empty one of a disabled scaler is refused."""
    check_not_disabled(_FORM.what, mapping)
    saved = Saved(_FORM.what, mapping).only("scale", *_FORM.settings, "incr_count", _COUNT, _DYNAMIC)
    if not saved.flag(_DYNAMIC):
        return started(Static(float(saved.scale32("scale"))))
    policy, state = _FORM.read({key: value for key, value in mapping.items() if key not in (_COUNT, _DYNAMIC)})
    every, count = cast("Ladder", policy).hysteresis, saved.count(_COUNT)
    if count >= every:
        raise ValueError(
            f"`decr_count` of {saved.what} must be below `decr_every_n_nan_or_inf`, at which it starts again from 0. "
            f"Received: decr_count={count}, decr_every_n_nan_or_inf={every}."
        )
    return policy, replace(state, credits=np.int32(every - count))


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns a dict for `GradScaler.load_state_dict`; the empty one for `NoScaling`, as a disabled scaler saves."""
    if isinstance(policy, NoScaling):
        return {}
    static = isinstance(policy, Static)
    # No other system refills as Paddle does. Without hysteresis that makes no difference.
    rule = partial(Ladder, 1.0, hysteresis=getattr(policy, "hysteresis", 1), refill="clean or backoff")
    written = replace(_FORM, rule=rule).write(rule() if static else policy, state)
    every = written["decr_every_n_nan_or_inf"]
    return written | {
        "scale": np.asarray([written["scale"]], np.float32),
        _COUNT: every - values_of(state).count("credits") if every > 1 else 0,
        _DYNAMIC: not static,
    }


VARIANTS = {"GradScaler": grad_scaler, "AmpScaler": amp_scaler}
