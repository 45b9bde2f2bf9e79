"""DeepSpeed: the scaler of ZeRO, those of the fused and unfused FP16 optimizers, and the JSON that sets them up."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from gradscale._text import shown_keys
from gradscale.peers._form import modulo_rule, read_iterations, values_of, write_iterations
from gradscale.peers._saved import Imported, Saved, started, whole_or_inside
from gradscale.peers._settings import Count, Limit, Positive, Whole, checked, static_as
from gradscale.peers._unpickle import attributes_of
from gradscale.peers.ladder import Ladder
from gradscale.policies.checks import check_number
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import NoScaling, Static

SCALE_FACTOR = 2.0
LATE = 1
"""Clean steps that do not count after the start and after an overflow. DeepSpeed grows where
`(cur_iter - last_overflow_iter) - 1` is a positive multiple of the window, a step later than apex without the `- 1`."""

_OPTIMIZER = "DeepSpeed's FP16 optimizer"

UNFUSED_MIN = 0.25
"""Floor of the unfused optimizer where the configuration gives none."""


@checked
def dynamic_loss_scaler(
    init_scale: Positive = 2.0**16,
    scale_window: Whole = 1000,
    min_scale: Limit = 1.0,
    delayed_shift: Count = 2,
    consecutive_hysteresis: bool = False,
    raise_error_at_min_scale: bool = True,
    dtype: Any = None,
) -> Ladder:
    """Returns the rule of `DynamicLossScaler`, which ZeRO uses: Python floats, hysteresis, a floor, no ceiling.

    Where it raises because the scale is at the floor already, the state is `stuck`, also if `raise_error_at_min_scale`
    is off. `dtype` only changes the text of its log.
    """
    del raise_error_at_min_scale, dtype
    hysteresis = _hysteresis(delayed_shift, consecutive_hysteresis)
    return modulo_rule(init_scale, SCALE_FACTOR, scale_window, floor=min_scale, late=LATE, **hysteresis)


def _hysteresis(delayed_shift: int, consecutive: bool) -> dict[str, Any]:
    return {"hysteresis": delayed_shift, "refill": "clean" if consecutive else "growth"}


loss_scaler = static_as("scale", 1.0)

fused_optimizer = partial(dynamic_loss_scaler, init_scale=2.0**32, delayed_shift=1)
"""The rule of the fused `FP16_Optimizer`, used without ZeRO. Only its newest versions have hysteresis."""


def unfused_optimizer(init_scale: float = 2.0**16, scale_window: int = 1000, min_scale: float = UNFUSED_MIN) -> Ladder:
    """Returns the rule of `FP16_UnfusedOptimizer`, used without ZeRO for LAMB: no hysteresis."""
    return dynamic_loss_scaler(init_scale, scale_window, min_scale, delayed_shift=1)


def config(
    enabled: bool = True,
    auto_cast: bool = False,
    loss_scale: float = 0,
    initial_scale_power: float = 16,
    loss_scale_window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_loss_scale: float = 1,
    fp16_master_weights_and_grads: bool = False,
) -> Ladder | Static | NoScaling:
    """Returns the rule under ZeRO of the `"fp16"` part of a DeepSpeed configuration; a `loss_scale` of 0 is dynamic."""
    del auto_cast, fp16_master_weights_and_grads
    if not enabled:
        return NoScaling()
    check_number("loss_scale", loss_scale)
    if loss_scale != 0:
        return Static(loss_scale)
    check_number("initial_scale_power", initial_scale_power)
    if not -1022 <= initial_scale_power <= 1023:
        raise ValueError(
            "`initial_scale_power` must give a power of two that a float holds, from -1022 to 1023. "
            f"Received: initial_scale_power={initial_scale_power!r}."
        )
    return dynamic_loss_scaler(
        2.0**initial_scale_power, loss_scale_window, min_loss_scale, hysteresis, consecutive_hysteresis
    )


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of a checkpoint, or of its optimizer: ZeRO's, the fused or the unfused one.

    Without ZeRO the floor and the hysteresis are not saved, and their defaults are assumed.
    """
    for part in whole_or_inside(mapping, "optimizer", "optimizer_state_dict"):
        if "loss_scaler" in part:
            attributes = attributes_of(part["loss_scaler"])  # older ones lack `consecutive_hysteresis`
            dynamic = {"dynamic_loss_scale": "scale_window" in attributes}
            return _read("DeepSpeed's loss scaler", {"consecutive_hysteresis": False, **attributes, **dynamic})
        if "cur_scale" in part:
            # Only versions with hysteresis save `cur_hysteresis`. The hysteresis itself is not saved: 2 is the default.
            shift = 2 if "cur_hysteresis" in part else 1
            unsaved = {"min_scale": 1.0, "delayed_shift": shift, "cur_hysteresis": 1, "consecutive_hysteresis": False}
            return _read(_OPTIMIZER, unsaved | dict(part))
        if "fp32_groups_flat" in part:
            return started(NoScaling())
    raise ValueError(
        "A DeepSpeed checkpoint of an FP16 run holds `loss_scaler` (ZeRO) or `cur_scale` in its `optimizer` or "
        f"`optimizer_state_dict`. Received keys: {shown_keys(mapping)}. A run in BF16 or FP32 has no scale."
    )


def _read(what: str, values: Mapping[str, Any]) -> Imported:
    saved = Saved(what, values)
    if not saved.flag("dynamic_loss_scale"):
        return read_iterations(saved, 0.0)
    floor = saved.scale("min_scale")
    hysteresis = _hysteresis(saved.count("delayed_shift", lowest=1), saved.flag("consecutive_hysteresis"))
    credits = saved.count("cur_hysteresis", lowest=1)
    return read_iterations(saved, floor, LATE, credits, **hysteresis)


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns the scaler's part of the fused or unfused optimizer's dict; merge it into the rest.

    The floor is not in it, and hysteresis only as the credits left; both must be in the configuration again.
    """
    rule = modulo_rule(1.0, SCALE_FACTOR, 1000, floor=1.0, late=LATE)
    written = write_iterations(_OPTIMIZER, policy, state, rule, ("floor", "hysteresis", "refill"))
    if isinstance(policy, Ladder) and policy.hysteresis > 1:
        written["cur_hysteresis"] = values_of(state).count("credits", lowest=1)
    return written


VARIANTS = {
    "DynamicLossScaler": dynamic_loss_scaler,
    "LossScaler": loss_scaler,
    "fused_optimizer._update_scale": fused_optimizer,
    "FP16_Optimizer": fused_optimizer,
    "unfused_optimizer._update_scale": unfused_optimizer,
    "FP16_UnfusedOptimizer": unfused_optimizer,
    "config": config,
}
