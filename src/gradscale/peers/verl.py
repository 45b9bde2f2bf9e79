"""verl: FSDP's `ShardedGradScaler` of torch, with an interval for reinforcement learning."""

from gradscale.peers import torch
from gradscale.peers.ladder import Ladder
from gradscale.policies.static import NoScaling


def sharded_grad_scaler(
    device: str = "cuda",
    init_scale: float = 2.0**16,
    backoff_factor: float = 0.5,
    growth_factor: float = 2.0,
    growth_interval: int = 400,
    enabled: bool = True,
) -> Ladder | NoScaling:
    """Returns the rule of the actor in FP16: torch's kernel, which grows the scale after 400 clean steps, not 2,000."""
    return torch.sharded_grad_scaler(device, init_scale, backoff_factor, growth_factor, growth_interval, enabled)


read = torch.read
write = torch.write

VARIANTS = {"ShardedGradScaler": sharded_grad_scaler}
