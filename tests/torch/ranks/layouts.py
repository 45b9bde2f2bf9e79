"""The ways in which a model is spread over ranks, with the engines of torch.distributed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist
from tests.torch.ranks.gpt import GPT
from tests.torch.versions import needs_1f1b_on_gloo, needs_sharding_on_cpu
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


@dataclass(frozen=True)
class Layout:
    """One way to spread the model.

    Attributes:
        ranks: how many it takes.
        spread: returns the model spread over them.
        parts: how many parts each batch is split into.
        schedule: the name of a schedule of `torch.distributed.pipelining`, if the model is cut into two stages.
    """

    ranks: int
    spread: Callable[[GPT], nn.Module]
    parts: int
    schedule: str | None = None

    def part(self, rank: int) -> int:
        """Returns which part of each batch is for `rank`. Ranks side by side share one, if there are fewer parts."""
        return rank * self.parts // self.ranks


def replicated(model: GPT) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def sharded(model: GPT, mesh: DeviceMesh | None = None) -> nn.Module:
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def sharded_and_replicated(model: GPT) -> nn.Module:
    return sharded(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def tensor_parallel(model: GPT, mesh: DeviceMesh | None = None) -> nn.Module:
    """Spreads the linear layers. Embedding and norms stay plain tensors, whole on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    for block in model.blocks.values():
        parallelize_module(block, mesh, BLOCK)
    return parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def sequence_parallel(model: GPT) -> nn.Module:
    """Spreads the linear layers and the embedding, and between them the sequences: gradients of norms are `Partial`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    gathers = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for block in model.blocks.values():
        plan: dict[str, Any] = BLOCK | {
            "norm1": SequenceParallel(),
            "attention": PrepareModuleInput(**gathers),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "norm2": SequenceParallel(),
            "mlp": PrepareModuleInput(**gathers),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    return parallelize_module(
        model,
        mesh,
        {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )


def sharded_and_tensor_parallel(model: GPT) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    tensor_parallel(model, mesh["tensor"])
    return sharded(model, mesh["shard"])


def stage(model: GPT) -> nn.Module:
    """Removes what the other of two stages has: the embedding and a block, or a block and the head."""
    if dist.get_rank() % 2 == 0:
        del model.blocks["1"]
        model.norm = model.head = None
    else:
        del model.blocks["0"]
        model.tokens = None
    return model


def replicated_stage(model: GPT) -> nn.Module:
    """Returns a stage, the same as that of the other pipeline."""
    replicas = pipelines_mesh().get_group("replica")
    # With it, DDP does not rebuild its buckets, which fails where a schedule calls the module without a backward pass.
    return nn.parallel.DistributedDataParallel(stage(model), process_group=replicas, find_unused_parameters=True)


def pipelines_mesh() -> DeviceMesh:
    """Returns the mesh of pipelines with two stages each."""
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replica", "stage"))


BLOCK: dict[str, Any] = {
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}
"""How tensor parallelism spreads a block."""

LAYOUTS = {
    "DDP on 2": Layout(2, replicated, 2),
    "FSDP2 on 2": Layout(2, sharded, 2),
    "TP on 2": Layout(2, tensor_parallel, 1),
    "SP on 2": Layout(2, sequence_parallel, 1),
    "GPipe on 2": Layout(2, stage, 1, "ScheduleGPipe"),
    "1F1B on 2": Layout(2, stage, 1, "Schedule1F1B"),
    "DDP on 4": Layout(4, replicated, 4),
    "HSDP on 2x2": Layout(4, sharded_and_replicated, 4),
    "FSDP2 x TP on 2x2": Layout(4, sharded_and_tensor_parallel, 2),
    "GPipe x DDP on 2x2": Layout(4, replicated_stage, 2, "ScheduleGPipe"),
    "1F1B x DDP on 2x2": Layout(4, replicated_stage, 2, "Schedule1F1B"),
}


def needs_sharding(layout: str) -> bool:
    """Returns whether a layout shards with `fully_shard`."""
    return "FSDP2" in layout or "HSDP" in layout


def case(layout: str, *others: Any) -> Any:
    """Returns a layout, and what else a test is called with, as a case that is skipped where torch cannot run it."""
    marks = [needs_sharding_on_cpu] if needs_sharding(layout) else []
    marks += [needs_1f1b_on_gloo] if "1F1B" in layout else []
    return pytest.param(layout, *others, marks=marks)
