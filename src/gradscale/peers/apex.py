"""NVIDIA apex: `amp`, `fp16_utils`, `contrib.optimizers.FP16_Optimizer`, and the hysteresis kernel."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from gradscale._text import short, shown_keys
from gradscale.peers._export import ladder_for, values_of
from gradscale.peers._iterations import modulo_rule, read_iterations, write_iterations
from gradscale.peers._saved import Imported, Saved, started
from gradscale.peers._settings import check_growth, check_kernel, check_limit, check_positive, whole
from gradscale.peers._unpickle import attributes_of
from gradscale.peers.ladder import NO_LIMIT, Ladder, kernel_ladder
from gradscale.policies.checks import check_count, check_number
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import Static

MAX_LOSS_SCALE = 2.0**24
"""Ceiling of `amp.LossScaler` by default."""


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
    check_positive("init_scale", init_scale)
    check_number("scale_factor", scale_factor)
    if min_loss_scale is not None:
        check_limit("min_loss_scale", min_loss_scale)
    check_limit("max_loss_scale", max_loss_scale)
    return _amp_rule(
        min(max_loss_scale, init_scale), whole("scale_window", scale_window), min_loss_scale, max_loss_scale
    )


def _amp_rule(scale: float, window: int, lowest: float | None, highest: float) -> Ladder:
    # apex tests `if self._min_loss_scale`, so that 0 and None both mean no floor. Its `update_scale` has a literal 2.
    return Ladder(init_scale=scale, growth_interval=window, floor=lowest or 0.0, ceiling=highest, arithmetic="float64")


def fp16_utils_dynamic_loss_scaler(
    init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000
) -> Ladder:
    """Returns the rule of `fp16_utils.DynamicLossScaler`: Python floats, floor 1, no ceiling."""
    check_positive("init_scale", init_scale)
    check_growth("scale_factor", scale_factor)
    return modulo_rule(init_scale, scale_factor, whole("scale_window", scale_window), floor=1.0)


def fp16_utils_loss_scaler(scale: float = 1.0) -> Static:
    """Returns the static scale of `fp16_utils.LossScaler`."""
    return Static(scale)


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


def update_scale_hysteresis(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
) -> Ladder:
    """Returns the rule of the `update_scale_hysteresis` kernel: torch's, with credits that any clean step restores."""
    check_kernel(init_scale, growth_factor, backoff_factor, growth_interval)
    check_count("hysteresis", hysteresis)
    # The kernel subtracts a credit at every overflow and never stops at zero.
    return kernel_ladder(
        init_scale,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis=hysteresis,
        refill="clean",
        fewest_credits=NO_LIMIT,
    )


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of `amp.state_dict()`, or of the `state_dict()` of either `FP16_Optimizer`.

    amp saves no settings: its defaults are assumed. With several losses, pass the scaler of one.
    """
    if "cur_scale" in mapping:
        return read_iterations(Saved("apex's contrib FP16_Optimizer", mapping), floor=1.0)
    if "loss_scaler" in mapping:
        return _read_object(attributes_of(mapping["loss_scaler"]))
    if isinstance(mapping.get("amp"), Mapping):
        raise ValueError(
            "apex amp saves one scaler for each loss, and a checkpoint holds them under the key it was saved with. "
            f"Received keys: {shown_keys(mapping)}. Pass `checkpoint['amp']`."
        )
    saved = Saved("apex amp", _only_loss(mapping)).only("loss_scale", "unskipped")
    policy = _amp_rule(saved.scale("loss_scale"), 2000, None, MAX_LOSS_SCALE)
    return started(policy, clean_steps=saved.count("unskipped"))


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
    if "_loss_scale" in attributes:
        return _read_amp_object(Saved("apex's amp.LossScaler", attributes))
    dynamic = "scale_window" in attributes
    saved = Saved("apex's fp16_utils loss scaler", {**attributes, "dynamic_loss_scale": dynamic})
    return read_iterations(saved, floor=1.0)


def _read_amp_object(saved: Saved) -> Imported:
    scale = saved.scale("_loss_scale")
    if not saved.flag("dynamic"):
        return started(Static(scale))
    lowest = None if saved.values.get("_min_loss_scale") is None else saved.scale("_min_loss_scale")
    policy = _amp_rule(scale, saved.count("_scale_seq_len", lowest=1), lowest, saved.scale("_max_loss_scale"))
    return started(policy, clean_steps=saved.count("_unskipped"))


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns a dict for `amp.load_state_dict`, or the scaler's part of the contrib `FP16_Optimizer`'s dict.

    The second where the policy is static, or has no ceiling, as only that class can be. amp's dict holds no settings:
    its window and bounds must be given to apex again.
    """
    no_ceiling = isinstance(policy, Ladder) and policy.ceiling == math.inf
    if isinstance(policy, Static) or no_ceiling:
        rule = modulo_rule(1.0, 2.0, 1000, floor=1.0)
        return write_iterations("apex's contrib FP16_Optimizer", policy, state, rule, ())
    rule = _amp_rule(1.0, 2000, None, MAX_LOSS_SCALE)
    ladder_for("apex amp", policy, rule, ("growth_interval", "floor", "ceiling"))
    values = values_of(state)
    return {"loss_scaler0": {"loss_scale": values.scale("scale"), "unskipped": values.count("clean_steps")}}


VARIANTS = {
    "amp.LossScaler": amp_loss_scaler,
    "fp16_utils.DynamicLossScaler": fp16_utils_dynamic_loss_scaler,
    "fp16_utils.LossScaler": fp16_utils_loss_scaler,
    "contrib.optimizers.FP16_Optimizer": contrib_fp16_optimizer,
    "contrib.optimizers.fp16_optimizer._update_scale": contrib_fp16_optimizer,
    "update_scale_hysteresis": update_scale_hysteresis,
}
