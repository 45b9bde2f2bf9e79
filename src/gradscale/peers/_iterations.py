"""Scalers that count all iterations and remember the last overflow, instead of counting clean steps.

Such a scaler grows when `(cur_iter - last_overflow_iter) % scale_window` comes round. apex's contrib optimizer and
DeepSpeed's save these counters in the same way; DeepSpeed begins to count one clean step later.
"""

from typing import Any

import numpy as np

from gradscale.peers._express import expressed, one_factor, scalars
from gradscale.peers._peer import Imported
from gradscale.peers._saved import Saved
from gradscale.peers.ladder import Ladder, LadderState
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import Static


def modulo_rule(init_scale: float, scale_factor: float, scale_window: int, floor: float, late: int = 0) -> Ladder:
    """Returns the rule in Python floats: times `scale_factor` to grow, divided by it to back off, down to `floor`."""
    return Ladder(
        init_scale=init_scale,
        growth_factor=scale_factor,
        backoff_factor=1.0,
        backoff_divisor=scale_factor,
        growth_interval=scale_window,
        late=late,
        floor=floor,
        arithmetic="float64",
    )


def read_iterations(saved: Saved, floor: float, late: int = 0) -> Imported:
    """Returns the rule and the state that `cur_scale`, `cur_iter` and, if the scale moves, its other keys say."""
    scale = saved.scale("cur_scale")
    if not saved.flag("dynamic_loss_scale"):
        return Static(scale), Static(scale).start()
    factor, window = saved.factor("scale_factor"), saved.count("scale_window", lowest=1)
    state = LadderState(scale=np.float64(scale), clean_steps=_clean_steps(saved, window, late))
    return modulo_rule(scale, factor, window, floor, late), state


def _clean_steps(saved: Saved, window: int, late: int) -> np.int32:
    """Returns the clean steps since the last overflow or growth; negative while they do not count yet."""
    since_overflow = saved.count("cur_iter") - saved.count("last_overflow_iter", lowest=-1) - 1
    if since_overflow < 0:
        raise ValueError(
            f"`last_overflow_iter` of {saved.what} must come before `cur_iter`. Received: "
            f"last_overflow_iter={saved.values['last_overflow_iter']!r}, cur_iter={saved.values['cur_iter']!r}."
        )
    counted = since_overflow - late
    return np.int32(counted % window if counted >= 0 else counted)


def write_iterations(
    system: str, policy: Policy, state: ScaleState, rule: Ladder, settings: tuple[str, ...]
) -> dict[str, Any]:
    """Returns the keys of a scaler that counts iterations, for a policy that it can follow."""
    values = scalars(state)
    steps = values.count("applied") + values.count("skipped")
    if isinstance(policy, Static):
        return {"dynamic_loss_scale": False, "cur_scale": values.scale("scale"), "cur_iter": steps}
    ladder = expressed(system, policy, rule, ("growth_factor", "backoff_factor", "growth_interval", *settings))
    factor = one_factor(system, ladder)
    since_overflow = values.count("clean_steps", lowest=-ladder.late) + ladder.late
    cur_iter = max(steps, since_overflow)
    return {
        "dynamic_loss_scale": True,
        "cur_scale": values.scale("scale"),
        "cur_iter": cur_iter,
        "last_overflow_iter": cur_iter - since_overflow - 1,
        "scale_factor": factor,
        "scale_window": int(ladder.growth_interval),
    }
