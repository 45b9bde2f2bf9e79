"""MindSpore: the update cells, the scalers of `amp`, and the managers of `Model`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gradscale.peers._form import FACTOR, Form, steps_between, steps_so_far, values_of
from gradscale.peers._saved import Imported, last_name, picked, started, without_weights
from gradscale.peers._settings import Count, Float32, Positive, checked, static_as
from gradscale.peers.ladder import Ladder, in_graph, one_factor_ladder
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import Static

_BAD_STEP_MAX = 1000
"""A literal in MindSpore's `DynamicLossScaleManager`."""


@in_graph
@checked
def dynamic_update_cell(loss_scale_value: Float32, scale_factor: Positive, scale_window: Count) -> Ladder:
    """Returns the rule of `nn.DynamicLossScaleUpdateCell`: float32, down to 1, up to infinity, where it stays.

    It multiplies by the reciprocal of `scale_factor` to back off.
    """
    return one_factor_ladder(loss_scale_value, scale_factor, scale_window, overshoot=True, floor=1.0)


@checked
def dynamic_loss_scaler(scale_value: Float32, scale_factor: Positive, scale_window: Count) -> Ladder:
    """Returns the rule of `amp.DynamicLossScaler`: float32, divided down to 1, never grown to infinity."""
    return one_factor_ladder(scale_value, scale_factor, scale_window, floor=1.0, refuses_inf=True)


@checked
def dynamic_manager(
    init_loss_scale: Positive = 2.0**24, scale_factor: Positive = 2.0, scale_window: Count = 2000
) -> Ladder:
    """Returns the rule of `DynamicLossScaleManager`, which runs on the host: Python floats, down to 1.

    After more than 1000 overflows in a row the manager raises; there the state is `stuck`.
    """
    if init_loss_scale < 1:
        raise ValueError(f"`init_loss_scale` must be at least 1. Received: init_loss_scale={init_loss_scale!r}.")
    backoff: dict[str, Any] = {"backoff_factor": 1 / scale_factor, "floor": 1.0, "most_skips": _BAD_STEP_MAX}
    return Ladder(init_loss_scale, scale_factor, growth_interval=scale_window, arithmetic="float64", **backoff)


def fixed_manager(loss_scale: float = 128.0, drop_overflow_update: bool = True) -> Static:
    """Returns the rule of `FixedLossScaleManager`; `Static` skips a step that overflows, asked to or not."""
    del drop_overflow_update
    return Static(loss_scale)


fixed_update_cell = static_as("loss_scale_value")
static_loss_scaler = static_as("scale_value")

_SETTINGS = {"scale_factor": FACTOR, "scale_window": "growth_interval"}
_SCALE, _STEP, _LAST = "scale_sense", "current_iterator_step", "last_overflow_iterator_step"


def _form(rule: Callable[..., Ladder], scale: str, counter: str, *, wraps: bool) -> Form:
    defaults: dict[str, Any] = {"scale_factor": 2.0, "scale_window": 2000}
    return Form("MindSpore", partial(rule, 1.0, **defaults), scale, counter, _SETTINGS, wraps=wraps)


_CELL = _form(dynamic_update_cell, _SCALE, "clean_steps", wraps=False)
_SCALER = _form(dynamic_loss_scaler, "scale_value", "counter", wraps=True)


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of the parameters of an update cell or of an `amp` scaler, or of a checkpoint.

    `scale_sense` or `scale_value` alone is a fixed scale. The settings are not among the parameters; `scale_factor` and
    `scale_window` may be added, and are 2 and 2000 otherwise.
    """
    cell = (_SCALE, _STEP, _LAST)
    mapping = without_weights(mapping, (*cell, _SCALER.scale, _SCALER.clean_steps, *_SETTINGS))
    found = set(map(last_name, mapping))
    for counters, scale in (({"counter"}, "scale_value"), (set(cell[1:]), _SCALE)):
        if scale in found and not found & counters:
            return started(Static(picked("MindSpore", mapping, (scale,)).scale(scale)))
    if found & {_SCALER.scale, _SCALER.clean_steps}:
        return _SCALER.read(mapping)
    saved = picked("MindSpore", mapping, cell, tuple(_SETTINGS))
    saved.count(_STEP, lowest=1)
    clean_steps = {"clean_steps": steps_between(saved, _LAST, _STEP) - 1}
    return _CELL.read({key: value for key, value in saved.values.items() if key not in cell[1:]} | clean_steps)


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns the parameters of the cell or of the scaler of `amp`, and their two settings, by name.

    A policy that is neither's own is written as the cell's, which is what a `Model` saves.
    """
    if isinstance(policy, Static):
        return {_SCALE: values_of(state).scale("scale")}
    if isinstance(policy, Ladder) and policy.refuses_inf:
        return _SCALER.write(policy, state)
    written = _CELL.write(policy, state)
    clean_steps = written.pop("clean_steps")
    # The cell counts its iterations from 1.
    step = steps_so_far(values_of(state), clean_steps) + 1
    return written | {_STEP: step, _LAST: step - clean_steps - 1}


VARIANTS = {
    "nn.DynamicLossScaleUpdateCell": dynamic_update_cell,
    "amp.DynamicLossScaler": dynamic_loss_scaler,
    "DynamicLossScaleManager": dynamic_manager,
    "FixedLossScaleManager": fixed_manager,
    "nn.FixedLossScaleUpdateCell": fixed_update_cell,
    "amp.StaticLossScaler": static_loss_scaler,
}
