"""OpenSeq2Seq: `BackoffScaler` and `LogMaxScaler`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from gradscale.peers._export import COMMON_SETTINGS, ladder_for, shared_factor, values_of
from gradscale.peers._log_max import LogMaxScaler
from gradscale.peers._saved import Imported, Saved, given, last_name, picked, started, without_weights
from gradscale.peers._settings import check_float32, check_positive
from gradscale.peers.ladder import Ladder, compiled, one_factor_ladder
from gradscale.policies.checks import check_count
from gradscale.policies.contract import Policy, ScaleState

_BACKOFF = ("iteration", "last_overflow_iteration", "scale")
_MODEL = ("x_hat", "slow_x_hat", "xsquared_hat", "b1_correction", "b2_correction")
_LOG_MAX = ("iteration", "scale", *_MODEL)
"""The variables of each scaler in the order of their creation. A checkpoint has no other names for them."""

_BACKOFF_SETTINGS = ("scale_min", "scale_max", "step_factor", "step_window")
_LOG_MAX_SETTINGS = ("scale_min", "scale_max", "log_max", "beta1", "beta2", "overflow_std_dev")

_UNNAMED = re.compile(r"Variable(?:_(\d{1,9}))?$")


def backoff_scaler(
    scale_min: float = 1.0, scale_max: float = 2.0**14, step_factor: float = 2.0, step_window: int = 2000
) -> Ladder:
    """Returns the rule of `BackoffScaler`: float32, within its bounds, starting from the upper one.

    Its graph multiplies by 1 / step_factor to back off. Which of two concurrent operations sees the iteration first is
    left to TensorFlow; this is the usual outcome.
    """
    check_float32("scale_min", scale_min)
    check_float32("scale_max", scale_max)
    check_positive("step_factor", step_factor)
    check_count("step_window", step_window)
    return compiled(one_factor_ladder(scale_max, step_factor, step_window, floor=scale_min, ceiling=scale_max))


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of a scaler's variables: by name, as `Variable`, `Variable_1`, ..., or a list.

    Three are those of `BackoffScaler` and seven those of `LogMaxScaler`. The settings are not among them; they may be
    added, by the names of the scaler's parameters.
    """
    known = (*_BACKOFF, *_LOG_MAX, *_BACKOFF_SETTINGS, *_LOG_MAX_SETTINGS)
    named = without_weights(_by_name(mapping), known)
    return _read_log_max(named) if "x_hat" in map(last_name, named) else _read_backoff(named)


def _by_name(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `mapping` with the scaler's unnamed variables under their names; a list comes as `optimizer`."""
    listed = mapping.get("optimizer")
    if isinstance(listed, Sequence):
        mapping = {f"Variable_{i}": value for i, value in enumerate(cast("Sequence[Any]", listed))}
    unnamed = [str(key) for key in mapping if _UNNAMED.match(last_name(key))]
    if not unnamed:
        return mapping
    names = {len(_BACKOFF): _BACKOFF, len(_LOG_MAX): _LOG_MAX}.get(len(unnamed))
    if names is None:
        raise ValueError(
            f"OpenSeq2Seq saves {len(_BACKOFF)} unnamed variables (Backoff: {', '.join(_BACKOFF)}) or {len(_LOG_MAX)} "
            f"(LogMax: {', '.join(_LOG_MAX)}). Received: {len(unnamed)}. Pass those of the scaler alone, or by name."
        )
    new_names = dict(zip(sorted(unnamed, key=_index), names, strict=True))
    return {new_names.get(str(key), str(key)): value for key, value in mapping.items()}


def _index(key: str) -> int:
    found = _UNNAMED.match(last_name(key))
    return int(found[1] or 0) if found else -1


def _read_backoff(named: Mapping[str, Any]) -> Imported:
    saved = picked("OpenSeq2Seq's BackoffScaler", named, _BACKOFF, _BACKOFF_SETTINGS)
    policy = backoff_scaler(**given(saved, "scale_min", "scale_max", "step_factor", counts=("step_window",)))
    since_overflow = saved.count("iteration") - saved.count("last_overflow_iteration", lowest=-1)
    if since_overflow < 0:
        raise ValueError(
            f"`last_overflow_iteration` of {saved.what} must not come after `iteration`. Received: "
            f"{saved.values['last_overflow_iteration']!r} after {saved.values['iteration']!r}."
        )
    return started(policy, scale=saved.scale("scale"), clean_steps=since_overflow % policy.growth_interval)


def _read_log_max(named: Mapping[str, Any]) -> Imported:
    saved = picked("OpenSeq2Seq's LogMaxScaler", named, _LOG_MAX, _LOG_MAX_SETTINGS)
    saved.count("iteration")
    policy = LogMaxScaler(**given(saved, *_LOG_MAX_SETTINGS))
    return started(policy, scale=saved.scale("scale"), **{name: saved.number(name) for name in _MODEL})


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns the variables of the scaler and its settings, by name, the variables in the order of their creation."""
    values = values_of(state)
    steps = values.count("applied") + values.count("skipped")
    if isinstance(policy, LogMaxScaler):
        return _written_log_max(policy, values, steps)
    system = "OpenSeq2Seq's BackoffScaler"
    ladder = ladder_for(system, policy, backoff_scaler(), (*COMMON_SETTINGS, "floor", "ceiling"))
    check_float32("scale_min", ladder.floor)
    check_float32("scale_max", ladder.ceiling)
    clean_steps = values.count("clean_steps")
    return {
        "iteration": max(steps, clean_steps),
        "last_overflow_iteration": max(steps, clean_steps) - clean_steps,
        "scale": values.scale("scale"),
        "scale_min": float(ladder.floor),
        "scale_max": float(ladder.ceiling),
        "step_factor": shared_factor(system, ladder),
        "step_window": int(ladder.growth_interval),
    }


def _written_log_max(policy: LogMaxScaler, values: Saved, steps: int) -> dict[str, Any]:
    variables = {"iteration": steps, "scale": values.scale("scale")} | {n: values.number(n) for n in _MODEL}
    settings = {key: value for key, value in policy.to_dict().items() if key not in ("schema", "kind")}
    return variables | settings


VARIANTS = {
    "BackoffScaler": backoff_scaler,
    "Backoff": backoff_scaler,
    "LogMaxScaler": LogMaxScaler,
    "LogMax": LogMaxScaler,
}
