"""FSDP2 in FP16: `torchrun --nproc-per-node 2 examples/torch_fsdp2.py`. One small all-reduce per step."""

import torch
import torch.distributed as dist
from char_gpt import batches, char_gpt, check_same, loss_of
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gradscale import Headroom
from gradscale.torch import LossScaler

STEPS = 80

dist.init_process_group("gloo")
rank = dist.get_rank()
model = char_gpt()
# Shards and their updates are float32, what is computed is FP16, and gradients are reduced in float32.
precision = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
for layer in (*model, model):
    fully_shard(layer, mp_policy=precision)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
# Far too high a scale to begin with, so that the first steps overflow: every rank skips the same ones.
scaler = LossScaler(model, Headroom(init_scale=2.0**32))

losses = []
for step, rows in enumerate(batches(STEPS, seed=rank)):
    loss = loss_of(model(rows[:, :-1]), rows)
    scaler.backward(loss)
    result = scaler.step(optimizer, clip_norm=1.0)
    optimizer.zero_grad()
    losses.append(loss.detach())
    if rank == 0 and (step % 20 == 0 or result.skipped()):
        print(f"step {step}: loss {loss:.3f}, scale {float(scaler.loss_scale):g}, {result.status()}")

check_same((each.full_tensor() for each in model.parameters()), scaler.state_dict())
if rank == 0:
    metrics = scaler.metrics()
    print(
        f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, "
        f"skipped {metrics['skipped']:.0f} of {STEPS} steps, scale {metrics['scale']:g}"
    )
dist.destroy_process_group()
