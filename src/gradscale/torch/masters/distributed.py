"""Masters of distributed parameters (FSDP2, tensor parallel): DTensors, of which each rank computes its own part.

The inner optimizer has DTensors, so that norms over a whole parameter, and its saved state, are those of the whole.
Storages read and write what this rank holds.
"""

from typing import Any

from torch import Tensor

from gradscale.torch.local import local


def is_distributed(tensor: Tensor) -> bool:
    """Returns whether this is a DTensor."""
    return hasattr(tensor, "to_local")


def distributed_as(model: Any, part: Tensor) -> Tensor:
    """Returns `part`, this rank's part of a whole that is distributed as `model` is, as such a tensor.

    In the same memory, and without communication. If `model` is a plain tensor, `part` itself.
    """
    if not is_distributed(model):
        return part
    from torch.distributed.tensor import DTensor  # not above: it takes a second

    shape, stride = model.shape, model.stride()
    return DTensor.from_local(
        part, model.device_mesh, model.placements, run_check=False, shape=shape, stride=tuple(stride)
    )


def redistributed_as(model: Any, whole: Any) -> Tensor:
    """Returns `whole`, which may be distributed in another way or not at all, distributed as `model` is."""
    if not is_distributed(model):
        return whole.full_tensor() if is_distributed(whole) else whole
    if is_distributed(whole):
        return whole.redistribute(model.device_mesh, model.placements)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, model.device_mesh, model.placements)


def set_part(tensor: Any, part: Tensor) -> None:
    """Makes `part` the memory of `tensor`, or of what this rank holds of it. The tensor stays the same object."""
    if is_distributed(tensor):
        # As FSDP2 does it: `data` of a DTensor is not where its numbers are.
        tensor._local_tensor = part
    else:
        tensor.data = part


def mesh_of(tensor: Any) -> Any:
    """Returns the ranks that hold parts of a tensor, or None for a plain one."""
    return getattr(tensor, "device_mesh", None)


def part_number(tensor: Any) -> int:
    """Returns which part of a tensor this rank holds: the same number for replicas, and 0 for a plain tensor."""
    if not is_distributed(tensor):
        return 0
    number = 0
    mesh = tensor.device_mesh
    for placement, position, size in zip(tensor.placements, mesh.get_coordinate(), mesh.shape, strict=True):
        if not placement.is_replicate():
            number = number * size + position
    return number


def version_and_address(weight: Tensor) -> tuple[int, int]:
    """Returns how often a weight was written to in place, itself or what this rank holds of it, and where that is."""
    part = local(weight)
    # A DTensor and its local part count their writes separately, and both counts only grow.
    return weight._version + (0 if part is weight else part._version), part.data_ptr()
