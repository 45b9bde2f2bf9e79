"""verl: FSDP's `ShardedGradScaler` of torch, with an interval for reinforcement learning."""

from functools import partial

from gradscale.peers import torch

sharded_grad_scaler = partial(torch.sharded_grad_scaler, device="cuda", growth_interval=400)
"""The rule of the actor in FP16: torch's kernel, which grows the scale after 400 clean steps, not 2,000."""

read = torch.read
write = torch.write
VARIANTS = {"ShardedGradScaler": sharded_grad_scaler}
