"""Paddle: `paddle.amp.GradScaler` and the `AmpScaler` under it."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from gradscale.peers._export import COMMON_SETTINGS, ladder_for, values_of
from gradscale.peers._saved import Imported, Saved, check_not_disabled, started
from gradscale.peers._settings import check_backoff, check_float32, check_growth
from gradscale.peers.ladder import Ladder
from gradscale.policies.checks import check_count
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import NoScaling, Static

_WHAT = "A Paddle GradScaler"
_KEYS = (
    "scale",
    "incr_ratio",
    "decr_ratio",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "incr_count",
    "decr_count",
    "use_dynamic_loss_scaling",
)


def grad_scaler(
    enable: bool = True,
    init_loss_scaling: float = 2.0**16,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
    use_dynamic_loss_scaling: bool = True,
) -> Ladder | Static | NoScaling:
    """Returns the rule of `GradScaler` in dynamic graphs: float32, without bounds.

    It backs off after `decr_every_n_nan_or_inf` overflows in a row, and then counts again from 0.
    """
    if not enable:
        return NoScaling()
    check_growth("incr_ratio", incr_ratio)
    check_backoff("decr_ratio", decr_ratio)
    if not use_dynamic_loss_scaling:
        return Static(init_loss_scaling)
    check_float32("init_loss_scaling", init_loss_scaling)
    check_count("incr_every_n_steps", incr_every_n_steps)
    check_count("decr_every_n_nan_or_inf", decr_every_n_nan_or_inf)
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


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of a `state_dict()`; the empty one of a disabled scaler is refused."""
    check_not_disabled(_WHAT, mapping)
    saved = Saved(_WHAT, mapping).only(*_KEYS)
    scale = float(saved.scale32("scale"))
    if not saved.flag("use_dynamic_loss_scaling"):
        return started(Static(scale))
    every = saved.count("decr_every_n_nan_or_inf", lowest=1)
    policy = Ladder(
        init_scale=scale,
        growth_factor=saved.factor("incr_ratio"),
        backoff_factor=saved.factor("decr_ratio"),
        growth_interval=saved.count("incr_every_n_steps", lowest=1),
        hysteresis=every,
        refill="clean or backoff",
    )
    return started(policy, clean_steps=saved.count("incr_count"), credits=every - _overflows(saved, every))


def _overflows(saved: Saved, every: int) -> int:
    """Returns the overflows in a row so far: fewer than make the scale back off."""
    count = saved.count("decr_count")
    if count >= every:
        raise ValueError(
            f"`decr_count` of {saved.what} must be below `decr_every_n_nan_or_inf`, at which it starts again from 0. "
            f"Received: decr_count={count}, decr_every_n_nan_or_inf={every}."
        )
    return count


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns a dict for `GradScaler.load_state_dict`; the empty one for `NoScaling`, as a disabled scaler saves."""
    if isinstance(policy, NoScaling):
        return {}
    dynamic = not isinstance(policy, Static)
    ladder = Ladder(init_scale=1.0)
    if dynamic:
        # No other system refills as Paddle does. Without hysteresis that makes no difference.
        rule = Ladder(init_scale=1.0, hysteresis=getattr(policy, "hysteresis", 1), refill="clean or backoff")
        ladder = ladder_for("Paddle's GradScaler", policy, rule, (*COMMON_SETTINGS, "hysteresis"))
    values, every = values_of(state), int(ladder.hysteresis)
    return {
        "scale": np.asarray([values.scale("scale")], np.float32),
        "incr_ratio": float(ladder.growth_factor),
        "decr_ratio": float(ladder.backoff),
        "incr_every_n_steps": int(ladder.growth_interval),
        "decr_every_n_nan_or_inf": every,
        "incr_count": values.count("clean_steps"),
        "decr_count": every - values.count("credits") if every > 1 else 0,
        "use_dynamic_loss_scaling": dynamic,
    }


VARIANTS = {"GradScaler": grad_scaler, "AmpScaler": amp_scaler}
