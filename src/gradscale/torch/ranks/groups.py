"""The process groups that users name, checked when a scaler is built."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn

from gradscale._shown import short

ALONE = "alone"
"""The group of a process that decides by itself."""

NOT_A_MEMBER = -100
"""What `torch.distributed.new_group` returns on a rank that is not in the new group."""


def check_group(group: Any) -> Any:
    """Returns the group of the ranks that decide together, or raises if it is none, or this rank is not in it."""
    if group is None or _is_process_group(group) or (isinstance(group, str) and group == ALONE):
        return group
    if isinstance(group, int) and group == NOT_A_MEMBER:
        _refuse_other_ranks("group")
    raise TypeError(
        '`group` must be a process group, None for every rank, or "alone" for this process. '
        f"Received: {short(group)}. Of a mesh, pass `mesh.get_group()`."
    )


def check_distinct(distinct: Any) -> Any:
    """Returns the group, or the mapping to groups, over which parameters are distinct, or raises if it is neither."""
    if not isinstance(distinct, Mapping):
        return distinct if distinct is None else _checked_part(distinct)
    for owner, group in distinct.items():
        if not isinstance(owner, nn.Module | Tensor):
            raise TypeError(
                f"`distinct` maps modules and parameters to groups. Received: {short(owner)} as a key. Pass the module "
                "itself, not its name."
            )
        _checked_part(group)
    return distinct


def _checked_part(group: Any) -> Any:
    """Returns a group or a mesh that parameters are distinct over, or raises if this rank is not in it."""
    if _is_mesh(group):
        if group.get_coordinate() is None:
            _refuse_other_ranks("distinct")
        return group
    if isinstance(group, int) and group == NOT_A_MEMBER:
        _refuse_other_ranks("distinct")
    if not _is_process_group(group):
        raise TypeError(
            "`distinct` must be a process group, a mesh, or a mapping of modules and parameters to such. "
            f"Received: {short(group)}. For every rank pass `torch.distributed.group.WORLD`."
        )
    return group


def _refuse_other_ranks(name: str) -> NoReturn:
    raise ValueError(
        f"`{name}` must contain this rank. Received: a group of other ranks. Make one group for each set of ranks, by "
        "`torch.distributed.new_group` on all of them, and pass the one that this rank is in."
    )


def _is_process_group(group: Any) -> bool:
    return dist.is_available() and isinstance(group, dist.ProcessGroup)


def _is_mesh(group: Any) -> bool:
    # By an attribute: importing `torch.distributed.device_mesh` takes a second.
    return hasattr(group, "mesh_dim_names")
