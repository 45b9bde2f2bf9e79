"""PyTorch: `torch.amp.GradScaler`, FSDP's `ShardedGradScaler`, and the trainers that save their state."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from gradscale._text import shown_keys
from gradscale.peers import apex
from gradscale.peers._form import COMMON_SETTINGS, Form
from gradscale.peers._saved import Imported, Saved, check_not_disabled, started
from gradscale.peers._settings import Backoff, Count, Float32, Growth, checked
from gradscale.peers.ladder import Ladder, kernel_ladder
from gradscale.policies.contract import Policy, ScaleState
from gradscale.policies.static import NoScaling, Static

_WHAT = "torch's GradScaler"
_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")

_LIGHTNING = ("MixedPrecision", "FSDPPrecision", "native_amp_scaling_state")
"""Keys under which Lightning's checkpoints hold the scaler's dict, newest first."""


@checked
def grad_scaler(
    device: str = "cuda",
    init_scale: Float32 = 2.0**16,
    growth_factor: Growth = 2.0,
    backoff_factor: Backoff = 0.5,
    growth_interval: Count = 2000,
    enabled: bool = True,
) -> Ladder | NoScaling:
    """Returns the rule of `GradScaler`: a float32 scale without bounds, times factors in double precision.

    The scale does not grow to infinity, but can back off to zero and stay there. `device` is ignored.
    """
    del device
    return kernel_ladder(init_scale, growth_factor, backoff_factor, growth_interval) if enabled else NoScaling()


@checked
def sharded_grad_scaler(
    device: str = "cpu",
    init_scale: Float32 = 2.0**16,
    backoff_factor: Backoff = 0.5,
    growth_factor: Growth = 2.0,
    growth_interval: Count = 2000,
    enabled: bool = True,
) -> Ladder | NoScaling:
    """Returns the rule of `ShardedGradScaler`, which on the CPU is written in Python and grows to infinity.

    On any other `device` it calls the same kernel as `GradScaler`.
    """
    rule = grad_scaler(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
    if device != "cpu" or isinstance(rule, NoScaling):
        return rule
    # The check for infinity is in the kernel, which Python's version on the CPU does not call.
    return replace(rule, refuses_inf=False, arithmetic="float32")


_FORM = Form(_WHAT, grad_scaler, "scale", "_growth_tracker", {name: name for name in COMMON_SETTINGS})


def read(mapping: Mapping[str, Any]) -> Imported:
    """Returns the policy and the state of a `state_dict()`: alone, as in Accelerate's `scaler.pt`, or of Lightning's.

    The empty dict, which a disabled scaler saves, is refused, as it is by torch.
    """
    if isinstance(very_old := mapping.get("amp_scaling_state"), Mapping):
        return apex.read(cast("Mapping[str, Any]", very_old))
    found = next((key for key in _LIGHTNING if isinstance(mapping.get(key), Mapping)), None)
    return _read_scaler(mapping if found is None else mapping[found])


def _read_scaler(mapping: Mapping[str, Any]) -> Imported:
    check_not_disabled(_WHAT, mapping)
    if mapping.keys().isdisjoint(_KEYS):
        raise ValueError(
            f"{_WHAT} saves the keys {', '.join(_KEYS)}, and a Lightning checkpoint holds them under one of the keys "
            f"{', '.join(map(repr, _LIGHTNING))}. Received keys: {shown_keys(mapping)}. A run in BF16 or FP32 has no "
            "scale to load."
        )
    saved = Saved(_WHAT, mapping).only(*_KEYS)
    scale, growth, backoff = saved.scale32("scale"), saved.factor("growth_factor"), saved.factor("backoff_factor")
    if growth == backoff == 1:  # as `write` stores a static scale
        return started(Static(float(scale)))
    policy = kernel_ladder(float(scale), growth, backoff, saved.count("growth_interval", lowest=1))
    return started(policy, clean_steps=saved.count("_growth_tracker"))


def write(policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns a dict for `GradScaler.load_state_dict`.

    `Static` is written with both factors 1, which `load_state_dict` takes; `NoScaling` as the empty dict
    of a disabled scaler, which only a disabled scaler loads.
    """
    if isinstance(policy, NoScaling):
        return {}
    if isinstance(policy, Static):
        policy = kernel_ladder(policy.scale, 1.0, 1.0, 2000)
    return _FORM.write(policy, state)


VARIANTS = {
    "torch.amp.GradScaler": grad_scaler,
    "torch.cuda.amp.GradScaler": grad_scaler,
    "torch.cpu.amp.GradScaler": grad_scaler,
    "torch_xla.amp.GradScaler": grad_scaler,
    "torch.distributed.fsdp.ShardedGradScaler": sharded_grad_scaler,
}
