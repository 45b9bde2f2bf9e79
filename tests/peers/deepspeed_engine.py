"""Trains with DeepSpeed's own engine on a CPU, through given overflows, and writes down its scales and a checkpoint.

`python -m tests.peers.deepspeed_engine` writes tests/data/deepspeed_engine.json, or the file that it is given, where
DeepSpeed is installed: `make test-deepspeed` makes such an environment.
"""

import base64
import json
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

RECORDED = Path(__file__).parents[1] / "data" / "deepspeed_engine.json"

FOUND_INF = [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 1]
SAVED_AFTER = 11
"""Steps before the checkpoint: one of the two credits of hysteresis is spent."""

BOTH = {"initial_scale_power": 8, "loss_scale_window": 2}
UNFUSED = {"init_scale": 256, "scale_window": 2, "min_scale": 1}
FP16_BY_STAGE = {
    0: BOTH,
    1: {**BOTH, "hysteresis": 2},
    2: {**BOTH, "hysteresis": 3, "consecutive_hysteresis": True},
    3: {**BOTH, "hysteresis": 1, "min_loss_scale": 4},
}
"""The `"fp16"` settings of a run with each stage of ZeRO; stage 0 is without."""


def row(stage: int) -> dict[str, Any]:
    """Returns what the engine did with this stage of ZeRO, as a row of the test data."""
    with TemporaryDirectory() as folder:
        scales, checkpoint = _train(FP16_BY_STAGE[stage], stage, folder)
    return {
        "id": f"deepspeed-engine-zero{stage}",
        "system": "deepspeed",
        "class": "config" if stage else "FP16_UnfusedOptimizer",
        "source": f"deepspeed {version('deepspeed')}, DeepSpeedEngine, ZeRO stage {stage}",
        "config": FP16_BY_STAGE[stage] if stage else UNFUSED,
        "pattern": "engine",
        "found_inf": FOUND_INF,
        "initial_scale": 256,
        "expected_scale": scales,
        "kind": "run",
        "saved_after": SAVED_AFTER,
        "checkpoint": base64.b64encode(checkpoint).decode("ascii"),
    }


def _train(fp16: Mapping[str, Any], stage: int, folder: str) -> tuple[list[float], bytes]:
    """Returns the scale after each step, and the file of the checkpoint in the middle that holds the scaler."""
    import torch

    engine = _engine(fp16, stage)
    scales: list[float] = []
    for step, overflow in enumerate(FOUND_INF):
        if step == SAVED_AFTER:
            engine.save_checkpoint(folder, tag="middle")
        loss = engine(torch.ones(1, 4).half()).float().mean()
        engine.backward(loss * (torch.inf if overflow else 1.0))
        engine.step()
        scales.append(float(engine.optimizer.loss_scale))
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt" if stage else "mp_rank_00_model_states.pt"
    return scales, (Path(folder) / "middle" / name).read_bytes()


def _engine(fp16: Mapping[str, Any], stage: int) -> Any:
    import torch

    # By name: it is not installed where the types are checked.
    deepspeed, accelerator = import_module("deepspeed"), import_module("deepspeed.accelerator")
    # It refuses FP16 on CPUs without instructions for it; torch computes it on all of them.
    accelerator.get_accelerator().is_fp16_supported = lambda: True
    model = torch.nn.Linear(4, 1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "fp16": {"enabled": True, **fp16},
        "zero_optimization": {"stage": stage},
    }
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


if __name__ == "__main__":
    # What DeepSpeed's launcher would set, for one process.
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update({"DS_ACCELERATOR": "cpu", **one})
    recorded = [json.dumps(row(stage)) for stage in FP16_BY_STAGE]
    Path(*sys.argv[1:] or [RECORDED]).write_text("[\n" + ",\n".join(recorded) + "\n]\n")
