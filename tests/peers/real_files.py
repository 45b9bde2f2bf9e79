"""Files as each system writes them, to be damaged: pickles of every protocol, and those of `torch.save`."""

import io
import json
import pickle
import sys
from collections import OrderedDict
from types import ModuleType
from typing import Any

from gradscale import Dynamic, Static
from gradscale.engine.saved import write_saved
from gradscale.peers import PEERS, export_state, preset

DEEPSPEED = "deepspeed.runtime.fp16.loss_scaler"
ZERO_SCALER = {
    "cur_scale": 1024.0,
    "cur_iter": 50,
    "last_overflow_iter": 20,
    "scale_factor": 2.0,
    "scale_window": 7,
    "min_scale": 1,
    "delayed_shift": 2,
    "cur_hysteresis": 1,
    "consecutive_hysteresis": True,
}
AMP_SCALER = {
    "_loss_scale": 32.0,
    "dynamic": True,
    "_max_loss_scale": 64.0,
    "_min_loss_scale": 2.0,
    "_scale_seq_len": 9,
    "_unskipped": 4,
}
REQUIRED = {
    "jmp": {"loss_scale": 1024.0},
    "mindspore": {"loss_scale_value": 1024.0, "scale_factor": 2.0, "scale_window": 5},
}
"""Settings without a default, of presets."""


def real_files() -> dict[str, bytes]:
    """Returns the files by name: what reads it, a hyphen, and what it is."""
    files: dict[str, bytes] = {}
    for system, values in _mappings():
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1) if system == "torch" else (2, 4):
            files[f"{system}-pickle {protocol} of {len(files)}"] = pickle.dumps(values, protocol)
        for name, data in _torch_files(values):
            files[f"{system}-{name} of {len(files)}"] = data
    for policy in (Dynamic(), Static(8.0), preset("deepspeed"), preset("openseq2seq", "LogMax")):
        files[f"saved-{type(policy).__name__}"] = json.dumps(write_saved(policy, policy.start())).encode()
    steps = {"found_inf": [1, 0, 0], "amax": [1.5, "inf", 2e-5], "loss_finite": [True, True, False]}
    files |= {"replay-json": json.dumps(steps).encode(), "replay-list": b"[0, 1, 0, 0, 1]", "replay-text": b"0 1, 0\n1"}
    return files


def _mappings() -> list[tuple[str, Any]]:
    """Returns what each system pickles."""
    mappings: list[tuple[str, Any]] = []
    for system, peer in PEERS.items():
        if peer.read is not None and peer.write is not None:
            policy = preset(system, **REQUIRED.get(system, {}))
            saved = export_state(system, policy, policy.start())
            # numpy's own numbers are refused in a pickle.
            mappings.append(
                (system, {key: value.item() if hasattr(value, "item") else value for key, value in saved.items()})
            )
    mappings.append(("lightning", {"MixedPrecision": dict(mappings)["torch"], "epoch": 3}))
    scaler = _scaler(DEEPSPEED, "DynamicLossScaler", ZERO_SCALER)
    mappings.append(("deepspeed", OrderedDict(optimizer_state_dict={"loss_scaler": scaler, "zero_stage": 3})))
    mappings.append(("apex", _scaler("apex.amp.scaler", "LossScaler", AMP_SCALER)))
    config = {"common": {"fp16_init_scale": 4, "min_loss_scale": 1e-4}, "optimization": {"update_freq": [2]}}
    mappings.append(("fairseq", {"cfg": config, "last_optimizer_state": {"loss_scale": 8.0}}))
    chained = {"grad_scaler": {"scale": 8.0, "growth_tracker": 3, "hysteresis_tracker": 1}}
    mappings.append(("megatron", {"optimizer": [chained, chained], "args": {"loss_scale_window": 5}}))
    mappings.append(("keras", {"optimizer": {"vars": {"0": 9, "1": 0.5, "2": 3, "3": 1024.0}}}))
    return mappings


def _scaler(module: str, name: str, attributes: dict[str, Any]) -> Any:
    """Returns an object that is pickled as one of another system's class."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), ModuleType(parts[end - 1]))
    scaler_class = type(name, (), {"__module__": module})
    setattr(sys.modules[module], name, scaler_class)
    scaler = scaler_class()
    vars(scaler).update(attributes)
    return scaler


def _torch_files(values: Any) -> list[tuple[str, bytes]]:
    """Returns the two files that `torch.save` makes, with a tensor in them; none without torch."""
    try:
        import torch
    except ImportError:
        return []
    files: list[tuple[str, bytes]] = []
    if isinstance(values, dict) and "MixedPrecision" in values:
        values = {**values, "state_dict": {"weight": torch.nn.Parameter(torch.ones(2)), "bias": torch.zeros(2).half()}}
    for name, zipped in (("zip", True), ("legacy", False)):
        stream = io.BytesIO()
        torch.save(values, stream, _use_new_zipfile_serialization=zipped)
        files.append((name, stream.getvalue()))
    return files
