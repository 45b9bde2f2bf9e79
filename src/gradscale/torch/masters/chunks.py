"""The parts of a model that are stepped one after the other, so that temporary float32 memory stays small."""

from collections.abc import Iterator, Sequence

from gradscale.torch.masters.master import Master

CHUNK_ON_CPU, CHUNK = 2**21, 2**25
"""Elements stepped at once, except that a tensor is never split. On the CPU few enough to stay in its caches between
the passes; elsewhere enough to keep a device busy, and still few beside a model."""


def chunks(groups: Sequence[Sequence[Master]]) -> Iterator[tuple[int, list[Master]]]:
    """Yields the parameters that have gradients in chunks of one group and one device, each with its group."""
    for group, masters in enumerate(groups):
        chunk: list[Master] = []
        elements = 0
        for master in masters:
            weight = master.weight
            if weight.grad is None:
                continue
            most = CHUNK_ON_CPU if weight.is_cpu else CHUNK
            if chunk and (elements + weight.numel() > most or chunk[-1].weight.device != weight.device):
                yield group, chunk
                chunk, elements = [], 0
            chunk.append(master)
            elements += weight.numel()
        if chunk:
            yield group, chunk
