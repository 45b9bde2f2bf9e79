"""The environment of a rank, as `accelerate launch --cpu` sets it."""

import os
import warnings

import torch.distributed as dist


def act_as_launched() -> int:
    """Sets what Accelerate reads to find out that it is one of several ranks, and returns which."""
    rank, world = dist.get_rank(), dist.get_world_size()
    set_by_launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in set_by_launch.items()})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"})
    warnings.simplefilter("error")
    return rank
