"""NVIDIA apex: `amp`, `fp16_utils`, `contrib.optimizers.FP16_Optimizer`, and the hysteresis kernel."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from gradscale._text import short, shown_keys
from gradscale.peers._form import Form, modulo_rule, read_iterations, write_iterations
from gradscale.peers._saved import Imported, Saved, started
from gradscale.peers._settings import Backoff, Count, Float32, Growth, Limit, Positive, Whole, checked, static_as
from gradscale.peers._unpickle import attributes_of
from gradscale.peers.ladder import NO_LIMIT, Ladder, kernel_ladder
from gradscale.policies.checks import check_number
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import Static

MAX_LOSS_SCALE = 2.0**24
"""Ceiling of `amp.LossScaler` by default."""


@checked
def _amp_rule(
    init_scale: Positive = 2.0**16,
    scale_window: Whole = 2000,
    min_loss_scale: Limit | None = None,
    max_loss_scale: Limit = MAX_LOSS_SCALE,
) -> Ladder:
    # apex tests `if self._min_loss_scale`, so that 0 and None both mean no floor. Its `update_scale` has a literal 2.
    bounds: dict[str, Any] = {"floor": min_loss_scale or 0.0, "ceiling": max_loss_scale}
    return Ladder(min(max_loss_scale, init_scale), growth_interval=scale_window, arithmetic="float64", **bounds)


def amp_loss_scaler(
    loss_scale: float | Literal["dynamic"] = "dynamic",
    init_scale: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = MAX_LOSS_SCALE,
) -> Ladder | Static:
    """Returns the rule of `amp.LossScaler`: Python floats, always 2 and 1/2, whatever `scale_factor` is.

    A `min_loss_scale` of zero counts as none. A number for `loss_scale` is a static scale.
    """
    if loss_scale != "dynamic":
        return Static(loss_scale)
    check_number("scale_factor", scale_factor)
    return _amp_rule(init_scale, scale_window, min_loss_scale, max_loss_scale)


@checked
def fp16_utils_dynamic_loss_scaler(
    init_scale: Positive = 2.0**32, scale_factor: Growth = 2.0, scale_window: Whole = 1000
) -> Ladder:
    """Returns the rule of `fp16_utils.DynamicLossScaler`: Python floats, floor 1, no ceiling."""
    return modulo_rule(init_scale, scale_factor, scale_window, floor=1.0)


fp16_utils_loss_scaler = static_as("scale", 1.0)


def contrib_fp16_optimizer(
    static_loss_scale: float | None = None,
    dynamic_loss_scale: bool | None = None,
    cur_scale: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 1000,
    init_scale: float | None = None,
) -> Ladder | Static:
    """Returns the rule of `contrib.optimizers.FP16_Optimizer`: dynamic unless a static scale is given.

    The class takes the first two; the next three it sets itself, and saves. `init_scale` is the name of `cur_scale` in
    apex's other classes.
    """
    if dynamic_loss_scale is False or (dynamic_loss_scale is None and static_loss_scale is not None):
        return Static(1.0 if static_loss_scale is None else static_loss_scale)
    return fp16_utils_dynamic_loss_scaler(cur_scale if init_scale is None else init_scale, scale_factor, scale_window)


@checked
def update_scale_hysteresis(
    init_scale: Float32 = 2.0**16,
    growth_factor: Growth = 2.0,
    backoff_factor: Backoff = 0.5,
    growth_interval: Count = 2000,
    hysteresis: Count = 1,
) -> Ladder:
    """Returns the rule of the `update_scale_hysteresis` kernel: torch's, with credits that any clean step restores."""
    # The kernel subtracts a credit at every overflow and never stops at zero.
    credits: dict[str, Any] = {"hysteresis": hysteresis, "refill": "clean", "fewest_credits": NO_LIMIT}
    return kernel_ladder(init_scale, growth_factor, backoff_factor, growth_interval, **credits)


_AMP = Form("apex amp", _amp_rule, "loss_scale", "unskipped")
_CONTRIB = "apex's contrib FP16_Optimizer"


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of `amp.state_dict()`, or of the `state_dict()` of either `FP16_Optimizer`.

    amp saves no settings: its defaults are assumed. With several losses, pass the scaler of one.
    """
    if "cur_scale" in mapping:
        return read_iterations(Saved(_CONTRIB, mapping), floor=1.0)
    if "loss_scaler" in mapping:
        return _read_object(attributes_of(mapping["loss_scaler"]))
    if isinstance(mapping.get("amp"), Mapping):
        raise ValueError(
            "apex amp saves one scaler for each loss, and a checkpoint holds them under the key it was saved with. "
            f"Received keys: {shown_keys(mapping)}. Pass `checkpoint['amp']`."
        )
    return _AMP.read(_only_loss(mapping))


def _only_loss(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the only scaler in amp's dict; `mapping` may also be that scaler."""
    losses = [key for key in mapping if str(key).startswith("loss_scaler")]
    if len(losses) > 1:
        raise ValueError(
            f"amp keeps one scaler for each loss, and a state is that of one. Received: {shown_keys(losses)}. "
            f"Choose one: import_state('apex', {{'loss_scaler0': mapping[{short(losses[-1])}]}})."
        )
    return mapping[losses[0]] if losses and len(mapping) == 1 else mapping


def _read_object(attributes: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of a scaler object: `amp.LossScaler`, or one of the older `fp16_utils`."""
    if "_loss_scale" not in attributes:
        dynamic = {"dynamic_loss_scale": "scale_window" in attributes}
        return read_iterations(Saved("apex's fp16_utils loss scaler", {**attributes, **dynamic}), floor=1.0)
    saved = Saved("apex's amp.LossScaler", attributes)
    scale = saved.scale("_loss_scale")
    if not saved.flag("dynamic"):
        return started(Static(scale))
    lowest = None if saved.values.get("_min_loss_scale") is None else saved.scale("_min_loss_scale")
    rule = _amp_rule(1.0, saved.count("_scale_seq_len", lowest=1), lowest, saved.scale("_max_loss_scale"))
    return started(replace(rule, init_scale=scale), clean_steps=saved.count("_unskipped"))


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns a dict for `amp.load_state_dict`, or the scaler's part of the contrib `FP16_Optimizer`'s dict.

    The second where the policy is static, or has no ceiling, as only that class can be. amp's dict holds no settings:
    its window and bounds must be given to apex again.
    """
    if isinstance(policy, Static) or (isinstance(policy, Ladder) and policy.ceiling == math.inf):
        return write_iterations(_CONTRIB, policy, state, modulo_rule(1.0, 2.0, 1000, floor=1.0))
    return {"loss_scaler0": _AMP.write(policy, state, given_again=("growth_interval", "floor", "ceiling"))}


VARIANTS = {
    "amp.LossScaler": amp_loss_scaler,
    "fp16_utils.DynamicLossScaler": fp16_utils_dynamic_loss_scaler,
    "fp16_utils.LossScaler": fp16_utils_loss_scaler,
    "contrib.optimizers.FP16_Optimizer": contrib_fp16_optimizer,
    "contrib.optimizers.fp16_optimizer._update_scale": contrib_fp16_optimizer,
    "update_scale_hysteresis": update_scale_hysteresis,
}
