"""Ray Train with two CPU workers, and DDP inside of them: `python examples/ray_train.py`."""

import tempfile
from typing import Any

import ray
import torch
from char_gpt import batches, char_gpt, check_same, loss_of
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from gradscale import Headroom
from gradscale.torch import LossScaler

STEPS = 80


def loop() -> dict[str, Any]:
    rank = train.get_context().get_world_rank()
    model = prepare_model(char_gpt())  # wrapped in DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
    # Far too high a scale to begin with, so that the first steps overflow: every worker skips the same ones.
    scaler = LossScaler(model, Headroom(init_scale=2.0**32))
    losses = []
    for step, rows in enumerate(batches(STEPS, seed=rank)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model(rows[:, :-1]), rows)
        scaler.backward(loss)
        result = scaler.step(optimizer, clip_norm=1.0)
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % 20 == 0:  # every worker must report; it waits for Ray's controller, and here for the device
            train.report({"loss": loss.item(), "status": str(result.status()), **scaler.metrics()})
    check_same(model.parameters(), scaler.state_dict())
    return {"first": float(losses[0]), "last": float(torch.stack(losses[-20:]).mean()), **scaler.metrics()}


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        result = TorchTrainer(
            loop,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        ).fit()
    of_rank_0: Any = result.return_value
    print(
        f"loss {of_rank_0['first']:.3f} -> {of_rank_0['last']:.3f}, "
        f"skipped {of_rank_0['skipped']:.0f} of {STEPS} steps, scale {of_rank_0['scale']:g}"
    )
