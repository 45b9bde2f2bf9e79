"""Scalers that count all iterations and remember the last overflow, instead of counting clean steps.

Such a scaler grows when `(cur_iter - last_overflow_iter) % scale_window` is 0. apex's contrib optimizer and
DeepSpeed's save these counters in the same way; DeepSpeed begins to count one clean step later.
"""

from typing import Any

from gradscale.peers._export import COMMON_SETTINGS, ladder_for, shared_factor, values_of
from gradscale.peers._saved import Imported, Saved, check_order, started
from gradscale.peers.ladder import Ladder, one_factor_ladder
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import Static


def modulo_rule(init_scale: float, scale_factor: float, scale_window: int, floor: float, late: int = 0) -> Ladder:
    """Returns the rule in Python floats: times `scale_factor` to grow, divided by it to back off, down to `floor`."""
    return one_factor_ladder(init_scale, scale_factor, scale_window, late=late, floor=floor, arithmetic="float64")


def read_iterations(saved: Saved, floor: float, late: int = 0) -> Imported:
    """Returns the rule and the state of `cur_scale`, `cur_iter` and, if the scale is dynamic, the other keys."""
    scale = saved.scale("cur_scale")
    if not saved.flag("dynamic_loss_scale"):
        return started(Static(scale))
    factor, window = saved.factor("scale_factor"), saved.count("scale_window", lowest=1)
    return started(modulo_rule(scale, factor, window, floor, late), clean_steps=_clean_steps(saved, window, late))


def _clean_steps(saved: Saved, window: int, late: int) -> int:
    """Returns the clean steps since the last overflow or growth; negative while they do not count yet."""
    # `cur_iter` is increased after the update, so an overflow in the last step gives a difference of 1, not 0.
    since_overflow = saved.count("cur_iter") - saved.count("last_overflow_iter", lowest=-1) - 1
    counted = check_order(saved, "last_overflow_iter", "cur_iter", since_overflow) - late
    return counted % window if counted >= 0 else counted


def write_iterations(
    system: str, policy: Policy, state: ScaleState, rule: Ladder, settings: tuple[str, ...]
) -> dict[str, Any]:
    """Returns the keys of a scaler that counts iterations, for a policy that it can follow."""
    values = values_of(state)
    steps = values.count("applied") + values.count("skipped")
    if isinstance(policy, Static):
        return {"dynamic_loss_scale": False, "cur_scale": values.scale("scale"), "cur_iter": steps}
    ladder = ladder_for(system, policy, rule, (*COMMON_SETTINGS, *settings))
    factor = shared_factor(system, ladder)
    since_overflow = values.count("clean_steps", lowest=-ladder.late) + ladder.late
    # An imported state counts no steps before the import, but its clean steps. `cur_iter` must not be below them.
    cur_iter = max(steps, since_overflow)
    return {
        "dynamic_loss_scale": True,
        "cur_scale": values.scale("scale"),
        "cur_iter": cur_iter,
        "last_overflow_iter": cur_iter - since_overflow - 1,
        "scale_factor": factor,
        "scale_window": int(ladder.growth_interval),
    }
