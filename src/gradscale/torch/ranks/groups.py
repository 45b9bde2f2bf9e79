"""The process groups that users name, checked when a scaler is built, and the rank that logs for all."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from gradscale._text import short
from gradscale.engine.saved import note_policy
from gradscale.policies.contract import Policy

ALONE = "alone"
"""The group of a process that decides by itself."""

NOT_A_MEMBER = -100
"""What `torch.distributed.new_group` returns on a rank that is not in the new group."""


def check_group(group: Any) -> Any:
    """Returns the group of the ranks that decide together, or raises if it is none, or this rank is not in it."""
    if group is None or (isinstance(group, str) and group == ALONE) or _is_group(group, "group"):
        return group
    raise TypeError(
        '`group` must be a process group, None for every rank, or "alone" for this process. '
        f"Received: {short(group)}. Of a mesh, pass `mesh.get_group()`."
    )


def check_distinct(distinct: Any) -> Any:
    """Returns the group, or the mapping to groups, over which parameters are distinct, or raises if it is neither."""
    if distinct is None:
        return None
    named = isinstance(distinct, Mapping)
    for owner, group in distinct.items() if named else [(None, distinct)]:
        if named and not isinstance(owner, nn.Module | Tensor):
            raise TypeError(
                f"`distinct` maps modules and parameters to groups. Received: {short(owner)} as a key. Pass the module "
                "itself, not its name."
            )
        if not _is_group(group, "distinct", or_mesh=True):
            raise TypeError(
                "`distinct` must be a process group, a mesh, or a mapping of modules and parameters to such. "
                f"Received: {short(group)}. For every rank pass `torch.distributed.group.WORLD`."
            )
    return distinct


def _is_group(group: Any, name: str, *, or_mesh: bool = False) -> bool:
    """Returns whether `group` is a process group, or a mesh. Raises if it is one of other ranks."""
    # By an attribute: importing `torch.distributed.device_mesh` takes a second.
    mesh = or_mesh and hasattr(group, "mesh_dim_names")
    if (mesh and group.get_coordinate() is None) or (isinstance(group, int) and group == NOT_A_MEMBER):
        raise ValueError(
            f"`{name}` must contain this rank. Received: a group of other ranks. Make one group for each set of ranks, "
            "by `torch.distributed.new_group` on all of them, and pass the one that this rank is in."
        )
    return mesh or (dist.is_available() and isinstance(group, dist.ProcessGroup))


def rank_and_ranks() -> tuple[int, int]:
    """Returns the rank of this process, and how many there are: 0 and 1 without ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def is_first_rank() -> bool:
    """Returns whether this process logs for all: rank 0, or one without ranks."""
    return rank_and_ranks()[0] == 0


def note_loaded_policy(present: Policy | None, saved: Policy | None) -> None:
    """Logs on rank 0 what a load does with a saved policy that is another one. None is torch's own rule."""
    if is_first_rank():
        note_policy(present, saved)
