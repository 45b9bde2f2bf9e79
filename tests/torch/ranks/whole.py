"""All of a model that is spread over ranks: its weights and optimizer state, whole, on every rank."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Optimizer = torch.optim.Optimizer


def whole(tensor: Tensor) -> Tensor:
    """Returns all of a tensor in shards; every rank must call it. Of replicas, the one of this rank."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()  # type: ignore[attr-defined]


def whole_state(model: nn.Module, optimizer: Optimizer, stages: Any = None) -> dict[str, list[Tensor]]:
    """Returns each parameter and its optimizer state by name, of the group of all `stages` if there are any."""
    found: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        held = [parameter, *(state[key] for key in sorted(state))]
        # DDP wraps the module, and names it so.
        found[name.removeprefix("module.")] = [whole(each) for each in held if isinstance(each, Tensor)]
    if stages is not None:
        parts: list[Any] = [None] * dist.get_world_size(stages)
        dist.all_gather_object(parts, found, group=stages)
        found = {name: tensors for part in parts for name, tensors in part.items()}
    return found


def digest_of(state: dict[str, list[Tensor]], scaler: dict[str, Any]) -> str:
    """Returns a digest of the bytes of all weights and optimizer state, and of the scaler's state."""
    found = hashlib.sha256(repr(sorted(scaler.items())).encode())
    for name in sorted(state):
        found.update(name.encode())
        for tensor in state[name]:
            found.update(tensor.contiguous().view(-1).numpy().tobytes())
    return found.hexdigest()
