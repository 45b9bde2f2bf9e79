"""The parts of a model that are stepped one after the other, so that temporary float32 memory stays small."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from gradscale.torch.local import local
from gradscale.torch.masters.distributed import mesh_of
from gradscale.torch.masters.master import Master

CHUNK_ON_CPU, CHUNK = 2**21, 2**25
"""Elements stepped at once, except that a tensor is never split. On the CPU few enough to stay in its caches between
the passes; elsewhere enough to keep a device busy, and still few beside a model."""


def chunks(groups: Sequence[Sequence[Master]]) -> Iterator[tuple[int, list[Master]]]:
    """Yields the parameters that have gradients in chunks of one group and one device, each with its group.

    DTensors and plain parameters, which torch's multi-tensor kernels do not take together, are in different chunks.
    """
    for group, masters in enumerate(groups):
        chunk: list[Master] = []
        elements = 0
        for master in masters:
            weight = master.weight
            if weight.grad is None:
                continue
            most = CHUNK_ON_CPU if weight.is_cpu else CHUNK
            count = local(weight).numel()
            if chunk and (elements + count > most or not _go_together(chunk[-1].weight, weight)):
                yield group, chunk
                chunk, elements = [], 0
            chunk.append(master)
            elements += count
        if chunk:
            yield group, chunk


def _go_together(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and mesh_of(one) == mesh_of(other)
