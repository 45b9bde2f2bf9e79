"""What `GradScaler` takes and saves beside torch's rule: a device, a new scale, and its state with torch's keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscale._text import short
from gradscale.engine.saved import KEY, Saved, read_saved, read_text, write_saved, write_text
from gradscale.peers.torch_rule import FACTORS, TorchRule, bounds_of, check_numbers, checked_scale
from gradscale.policies.checks import HIGHEST_SCALE, LOWEST_SCALE, check_number
from gradscale.policies.contract import Policy
from gradscale.policies.dynamic import Dynamic
from gradscale.torch.host import Rule


def check_device(device: Any) -> None:
    """Raises unless `device` may be the type of a device: torch takes anything here, and ignores it."""
    if isinstance(device, str | torch.device):
        return
    if isinstance(device, torch.optim.Optimizer):
        fix = "`scaler.step(optimizer)` takes the optimizer."
    elif isinstance(device, torch.nn.Module):
        fix = "Leave the model out, or use `gradscale.torch.LossScaler(model)`."
    elif isinstance(device, int | float):
        fix = f"Give a scale by name, as `init_scale={device!r}`."
    else:
        fix = "Give a policy by name, as `policy=...`." if hasattr(device, "next") else "Leave it out."
    raise TypeError(
        "`device`, the first argument of `GradScaler`, must be the type of a device, such as 'cuda'. "
        f"Received: {' '.join(short(device).split())}. {fix}"
    )


def number_of(new_scale: float | Tensor, device: str, policy: Policy) -> float:
    """Returns a scale that was given to `update`, of a tensor its one number, which is read; or raises.

    A tensor that is no such number has torch's error. torch would take 0, inf or NaN, and scale by it from then on.
    """
    if isinstance(new_scale, Tensor):
        one_number = new_scale.device.type == torch.device(device).type and new_scale.numel() == 1
        if not one_number or new_scale.requires_grad:
            raise AssertionError(
                "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
                "torch.FloatTensor with requires_grad=False."
            )
        new_scale = float(new_scale)
    return checked_scale("new_scale", new_scale, policy)


def write_extra(rule: Rule) -> dict[str, str]:
    """Returns the entry beside torch's five, which torch ignores when it loads, or an empty dict if these suffice."""
    if not isinstance(rule.policy, TorchRule):
        return {KEY: write_text(write_saved(rule.policy, rule.state, float(rule.catch_up().amax_ratio)))}
    lowest, highest = bounds_of(rule.policy)
    bounds = {"min_scale": lowest, "max_scale": highest}
    return {} if (lowest, highest) == (LOWEST_SCALE, HIGHEST_SCALE) else {KEY: write_text(bounds)}


def read_scaler(saved: Mapping[str, Any], policy: Policy) -> tuple[dict[str, Any], Saved]:
    """Returns torch's five entries and the rule of a saved scaler, of this class or of torch's.

    Saved settings override those of the loading scaler, as in torch; `policy` is kept where neither another nor bounds
    were saved. Raises before anything is changed.

    Raises:
        KeyError: one of torch's five entries is missing.
        TypeError: a value has the wrong type.
        ValueError: a value is out of range, or the entry of this class is not as `write_extra` wrote it.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(f"`load_state_dict` takes what `state_dict` returned. Received: {type(saved).__name__}.")
    numbers: dict[str, Any] = {}
    for name in ("scale", *FACTORS, "_growth_tracker"):
        if name not in saved:
            error = KeyError(name)
            error.add_note(
                f"A saved GradScaler has the entries scale, {', '.join(FACTORS)} and _growth_tracker. "
                f"Received: {sorted(map(str, saved))[:10]}. Another system's state is read by `gradscale.import_state`."
            )
            raise error
        value: Any = saved[name]
        numbers[name] = value.item() if isinstance(value, Tensor | np.generic) and value.ndim == 0 else value
        check_number(name, numbers[name])
    extra = read_text(saved.get(KEY, {}))
    if not isinstance(extra, Mapping):
        raise TypeError(f"`{KEY}` of a saved GradScaler must hold a mapping. Received: {type(extra).__name__}.")
    if extra and "policy" not in extra and set(extra) != {"min_scale", "max_scale"}:
        raise ValueError(
            f"`{KEY}` of a saved GradScaler holds a policy and its state, or max_scale and min_scale. "
            f"Received the keys: {sorted(map(str, extra))[:10]}."
        )
    # The rules of some systems count from -1, and both factors are 1 in a static scale that was exported to torch.
    checked = dict(numbers)
    if "policy" in extra and checked["_growth_tracker"] == -1:
        del checked["_growth_tracker"]
    if checked["growth_factor"] == checked["backoff_factor"] == 1:
        del checked["growth_factor"], checked["backoff_factor"]
    check_numbers(checked)
    factors = {name: numbers[name] for name in FACTORS}
    if "policy" in extra:
        rule = read_saved(extra)
    else:
        if extra:
            floor, ceiling = extra["min_scale"], extra["max_scale"]
            policy = TorchRule(**factors, init_scale=floor, floor=floor, ceiling=ceiling)
        elif isinstance(policy, Dynamic | TorchRule):
            policy = replace(policy, **factors)
        rule = Saved(policy, policy.start())
    lowest, highest = bounds_of(rule.policy)
    numbers["scale"] = min(max(float(numbers["scale"]), lowest), highest)
    # torch's numbers are the current ones: users and libraries set the scale, not the rule.
    tracker = np.int32(numbers["_growth_tracker"])
    return numbers, rule._replace(state=replace(rule.state, scale=np.float32(numbers["scale"]), clean_steps=tracker))
