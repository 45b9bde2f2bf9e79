"""MindSpore: the update cells, the scalers of `amp`, and the managers of `Model`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gradscale.peers._express import expressed, one_factor, scalars
from gradscale.peers._manager import MindsporeManager
from gradscale.peers._peer import Imported, Peer
from gradscale.peers._saved import Saved
from gradscale.peers._settings import check_float32, check_positive
from gradscale.peers._variables import given, last_name, picked, without_weights
from gradscale.peers.jmp import unwrapped, wrapped
from gradscale.peers.ladder import Ladder, reciprocal
from gradscale.policies.checks import check_count
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import Static

_CELL = ("scale_sense", "current_iterator_step", "last_overflow_iterator_step")
_SCALER = ("scale_value", "counter")
_SETTINGS = ("scale_factor", "scale_window")


def dynamic_update_cell(loss_scale_value: float, scale_factor: float, scale_window: int) -> Ladder:
    """Returns the rule of `nn.DynamicLossScaleUpdateCell`: float32, down to 1, up to infinity, and stuck there.

    It multiplies by the reciprocal of `scale_factor` to back off.
    """
    _check(scale_factor, scale_window)
    check_float32("loss_scale_value", loss_scale_value)
    return Ladder(
        init_scale=loss_scale_value,
        growth_factor=scale_factor,
        backoff_factor=reciprocal(scale_factor),
        growth_interval=scale_window,
        overshoot=True,
        floor=1.0,
    )


def dynamic_loss_scaler(scale_value: float, scale_factor: float, scale_window: int) -> Ladder:
    """Returns the rule of `amp.DynamicLossScaler`: float32, divided down to 1, never grown to infinity."""
    _check(scale_factor, scale_window)
    check_float32("scale_value", scale_value)
    return Ladder(
        init_scale=scale_value,
        growth_factor=scale_factor,
        backoff_factor=1.0,
        backoff_divisor=scale_factor,
        growth_interval=scale_window,
        floor=1.0,
        refuses_inf=True,
    )


def _check(scale_factor: float, scale_window: int) -> None:
    check_positive("scale_factor", scale_factor)
    check_count("scale_window", scale_window)


def fixed_manager(loss_scale: float = 128.0, drop_overflow_update: bool = True) -> Static:
    """Returns the rule of `FixedLossScaleManager`; `Static` skips a step that overflows, asked to or not."""
    del drop_overflow_update
    return Static(loss_scale)


def fixed_update_cell(loss_scale_value: float) -> Static:
    """Returns the rule of `nn.FixedLossScaleUpdateCell`."""
    return Static(loss_scale_value)


def static_loss_scaler(scale_value: float) -> Static:
    """Returns the rule of `amp.StaticLossScaler`."""
    return Static(scale_value)


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns what the parameters of an update cell say, or those of a scaler of `amp`, alone or in a checkpoint.

    `scale_sense` or `scale_value` alone is a fixed scale. The settings are not among the parameters; `scale_factor` and
    `scale_window` may be put beside, and are 2 and 2000 otherwise.
    """
    mapping = without_weights(mapping, (*_CELL, *_SCALER, *_SETTINGS))
    names = set(map(last_name, mapping))
    if names & set(_SCALER):
        return _read_scaler(mapping, "counter" in names)
    if "scale_sense" in names and not names & {*_CELL[1:]}:
        return _fixed(picked("A fixed scale of MindSpore", mapping, ("scale_sense",)), "scale_sense")
    saved = picked("A loss scale cell of MindSpore", mapping, _CELL, _SETTINGS)
    policy = replace(dynamic_update_cell(1.0, **_settings(saved)), init_scale=saved.scale("scale_sense"))
    step, last = saved.count(_CELL[1], lowest=1), saved.count(_CELL[2])
    if last >= step:
        raise ValueError(
            f"`last_overflow_iterator_step` of {saved.what} must come before `current_iterator_step`. "
            f"Received: last_overflow_iterator_step={last}, current_iterator_step={step}."
        )
    return policy, replace(policy.start(), clean_steps=np.int32(step - last - 1))


def _read_scaler(mapping: Mapping[str, Any], dynamic: bool) -> Imported:
    what = "A loss scaler of mindspore.amp"
    if not dynamic:
        return _fixed(picked(what, mapping, ("scale_value",)), "scale_value")
    saved = picked(what, mapping, _SCALER, _SETTINGS)
    policy = replace(dynamic_loss_scaler(1.0, **_settings(saved)), init_scale=saved.scale("scale_value"))
    counter = wrapped(saved.count("counter"), policy.growth_interval)
    return policy, replace(policy.start(), clean_steps=np.int32(counter))


def _fixed(saved: Saved, key: str) -> Imported:
    policy = Static(saved.scale(key))
    return policy, policy.start()


def _settings(saved: Saved) -> dict[str, Any]:
    return {"scale_factor": 2.0, "scale_window": 2000} | given(saved, "scale_factor", counts=("scale_window",))


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns the parameters of the cell or of the scaler of `amp`, and their two settings, by name.

    A policy that is neither's own is written as the cell's, which is what a `Model` saves.
    """
    values = scalars(state)
    if isinstance(policy, Static):
        return {"scale_sense": values.scale("scale")}
    if isinstance(policy, MindsporeManager):
        policy = dynamic_update_cell(policy.init_loss_scale, policy.scale_factor, policy.scale_window)
    system, clean_steps = "MindSpore", values.count("clean_steps", lowest=-1)
    rule = dynamic_update_cell(1.0, 2.0, 2000)
    ladder = expressed(system, policy, rule, ("growth_factor", "backoff_factor", "growth_interval"))
    window = int(ladder.growth_interval)
    settings = {"scale_factor": one_factor(system, ladder), "scale_window": window}
    if ladder.refuses_inf:
        counter = unwrapped(clean_steps, window)
        return {"scale_value": values.scale("scale"), "counter": counter, **settings}
    step = max(values.count("applied") + values.count("skipped"), clean_steps) + 1
    return {**dict(zip(_CELL, (values.scale("scale"), step, step - clean_steps - 1), strict=True)), **settings}


PEER = Peer(
    name="mindspore",
    variants={
        "nn.DynamicLossScaleUpdateCell": dynamic_update_cell,
        "amp.DynamicLossScaler": dynamic_loss_scaler,
        "DynamicLossScaleManager": MindsporeManager,
        "FixedLossScaleManager": fixed_manager,
        "nn.FixedLossScaleUpdateCell": fixed_update_cell,
        "amp.StaticLossScaler": static_loss_scaler,
    },
    read=read,
    write=write,
)
