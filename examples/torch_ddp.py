"""DDP: `torchrun --nproc-per-node 2 examples/torch_ddp.py`. A clean step sends nothing but DDP's own gradients."""

import torch
import torch.distributed as dist
from char_gpt import batches, char_gpt, check_same, loss_of
from torch.nn.parallel import DistributedDataParallel

from gradscale import Headroom
from gradscale.torch import LossScaler

STEPS = 80

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(char_gpt())
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
# Far too high a scale to begin with, so that the first steps overflow: every rank skips the same ones.
scaler = LossScaler(model, Headroom(init_scale=2.0**32))

losses = []
for step, rows in enumerate(batches(STEPS, seed=rank)):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_of(model(rows[:, :-1]), rows)
    scaler.backward(loss)
    result = scaler.step(optimizer, clip_norm=1.0)
    optimizer.zero_grad()
    losses.append(loss.detach())
    if rank == 0 and (step % 20 == 0 or result.skipped()):
        print(f"step {step}: loss {loss:.3f}, scale {float(scaler.loss_scale):g}, {result.status()}")

check_same(model.parameters(), scaler.state_dict())
if rank == 0:
    metrics = scaler.metrics()
    print(
        f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}, "
        f"skipped {metrics['skipped']:.0f} of {STEPS} steps, scale {metrics['scale']:g}"
    )
dist.destroy_process_group()
