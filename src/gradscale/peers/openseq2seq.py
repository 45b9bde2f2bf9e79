"""OpenSeq2Seq: `BackoffScaler` and `LogMaxScaler`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from gradscale.peers._form import FACTOR, Form, steps_between, steps_so_far, values_of
from gradscale.peers._log_max import LogMaxScaler
from gradscale.peers._saved import Imported, last_name, picked, started, without_weights
from gradscale.peers._settings import Count, Float32, Positive, checked
from gradscale.peers.ladder import Ladder, in_graph, one_factor_ladder
from gradscale.policies.contract import Policy, ScaleState

_BACKOFF = ("iteration", "last_overflow_iteration", "scale")
_MODEL = ("x_hat", "slow_x_hat", "xsquared_hat", "b1_correction", "b2_correction")
_LOG_MAX = ("iteration", "scale", *_MODEL)
"""The variables of each scaler in the order of their creation. A checkpoint has no other names for them."""

_BACKOFF_SETTINGS = {
    "scale_min": "floor",
    "scale_max": "ceiling",
    "step_factor": FACTOR,
    "step_window": "growth_interval",
}
_LOG_MAX_SETTINGS = ("scale_min", "scale_max", "log_max", "beta1", "beta2", "overflow_std_dev")

_UNNAMED = re.compile(r"Variable(?:_(\d{1,9}))?$")


@in_graph
@checked
def backoff_scaler(
    scale_min: Float32 = 1.0, scale_max: Float32 = 2.0**14, step_factor: Positive = 2.0, step_window: Count = 2000
) -> Ladder:
    """Returns the rule of `BackoffScaler`: float32, within its bounds, starting from the upper one.

    Its graph multiplies by 1 / step_factor to back off. Which of two concurrent operations sees the iteration first is
    left to TensorFlow; this is the usual outcome.
    """
    return one_factor_ladder(scale_max, step_factor, step_window, floor=scale_min, ceiling=scale_max)


_FORM = Form("OpenSeq2Seq's BackoffScaler", backoff_scaler, "scale", "clean_steps", _BACKOFF_SETTINGS)


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
    saved = picked(_FORM.what, named, _BACKOFF, tuple(_BACKOFF_SETTINGS))
    now, last, _ = _BACKOFF
    window = saved.count("step_window", lowest=1) if "step_window" in saved.values else 2000
    clean_steps = {"clean_steps": steps_between(saved, last, now, lowest=-1, fewest=0) % window}
    return _FORM.read({key: value for key, value in saved.values.items() if key not in (now, last)} | clean_steps)


def _read_log_max(named: Mapping[str, Any]) -> Imported:
    saved = picked("OpenSeq2Seq's LogMaxScaler", named, _LOG_MAX, _LOG_MAX_SETTINGS)
    saved.count("iteration")
    policy = LogMaxScaler(**{name: saved.number(name) for name in _LOG_MAX_SETTINGS if name in saved.values})
    return started(policy, scale=saved.scale("scale"), **{name: saved.number(name) for name in _MODEL})


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns the variables of the scaler and its settings, by name, the variables in the order of their creation."""
    values = values_of(state)
    if isinstance(policy, LogMaxScaler):
        variables = {"iteration": steps_so_far(values, 0), "scale": values.scale("scale")}
        variables |= {name: values.number(name) for name in _MODEL}
        return variables | {name: getattr(policy, name) for name in _LOG_MAX_SETTINGS}
    written = _FORM.write(policy, state)
    backoff_scaler(written["scale_min"], written["scale_max"])  # raises unless float32 holds them
    clean_steps = written.pop("clean_steps")
    now = steps_so_far(values, clean_steps)
    return dict(zip(_BACKOFF, (now, now - clean_steps, written.pop("scale")), strict=True)) | written


VARIANTS = {
    "BackoffScaler": backoff_scaler,
    "Backoff": backoff_scaler,
    "LogMaxScaler": LogMaxScaler,
    "LogMax": LogMaxScaler,
}
