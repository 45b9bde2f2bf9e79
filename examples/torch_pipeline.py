"""A pipeline of two stages: `torchrun --nproc-per-node 2 examples/torch_pipeline.py`. The loss is on the last one."""

import torch
import torch.distributed as dist
from char_gpt import batches, char_gpt, check_same, loss_of
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from gradscale import Headroom
from gradscale.torch import LossScaler

STEPS, MICRO_BATCHES = 100, 4

dist.init_process_group("gloo")
rank = dist.get_rank()
layers = char_gpt()
model = layers[:2] if rank == 0 else layers[2:]
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
# Far too high a scale to begin with, so that the first steps overflow: every stage skips the same ones.
# The stages have other parameters each, so that the norm is a sum over them.
scaler = LossScaler(model, Headroom(init_scale=2.0**32), distinct=dist.group.WORLD)
stage = PipelineStage(model, rank, dist.get_world_size(), torch.device("cpu"))
schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=scaler.wrap_loss(loss_of))

losses = []
for step, rows in enumerate(batches(STEPS, seed=0)):
    of_micro_batches: list[torch.Tensor] = []
    with torch.autocast("cpu", dtype=torch.float16):
        if rank == 0:
            schedule.step(rows[:, :-1])
        else:
            schedule.step(target=rows, losses=of_micro_batches)
    result = scaler.step(optimizer, clip_norm=1.0)
    optimizer.zero_grad()
    if of_micro_batches:
        losses.append(torch.stack(of_micro_batches).mean().detach())
        if step % 20 == 0 or result.skipped():
            print(f"step {step}: loss {losses[-1]:.3f}, scale {float(scaler.loss_scale):g}, {result.status()}")

updates = optimizer.state[next(model.parameters())]["step"]  # the same number on every stage, though the weights differ
check_same([updates], scaler.state_dict())
if losses:
    metrics = scaler.metrics()
    print(
        f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, "
        f"skipped {metrics['skipped']:.0f} of {STEPS} steps, scale {metrics['scale']:g}"
    )
dist.destroy_process_group()
