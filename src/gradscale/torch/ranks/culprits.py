"""The culprits of all ranks, in small collectives whose number and size depend on the names, not on the ranks."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradscale.engine.culprits import Culprit

MOST_CULPRITS = 100
"""How many are named."""

NOBODY = 2**62
"""In the place of a rank, that of none."""


def culprits_of_all(own: Sequence[Culprit], device: torch.device, group: Any) -> list[Culprit]:
    """Returns the culprits of all ranks, the same on each, of which there may be `MOST_CULPRITS`. Synchronizes.

    Every rank must call it. One rank after the other sends the names that were not sent before, the lowest first, so
    that ranks which hold the same send nothing. The count is that of the rank which has most: others may hold the same
    elements, or others of the gradient.
    """
    held = {each.name: each for each in own}
    names: dict[str, None] = {}
    while len(names) < MOST_CULPRITS:
        unsent = [name for name in held if name not in names][: MOST_CULPRITS - len(names)]
        sent = _first_to_send(unsent, device, group)
        if not sent:
            break
        names |= dict.fromkeys(sent)
    return _joined(list(names), held, device, group)


def _first_to_send(names: Sequence[str], device: torch.device, group: Any) -> list[str]:
    """Returns the names of the lowest rank that has any; none if no rank has."""
    text = json.dumps(names).encode()
    # The rank above, the length of its text below: the lowest of these numbers is that of the lowest rank.
    first = torch.full((), (dist.get_rank() << 32) + len(text) if names else NOBODY, dtype=torch.int64, device=device)
    dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
    if (found := int(first)) == NOBODY:
        return []
    source, length = found >> 32, found & 0xFFFFFFFF
    sends = source == dist.get_rank()
    packed = torch.tensor(list(text) if sends else [0] * length, dtype=torch.uint8, device=device)
    dist.broadcast(packed, source, group=group)
    return json.loads(bytes(packed.tolist()))


def _joined(names: Sequence[str], held: Mapping[str, Culprit], device: torch.device, group: Any) -> list[Culprit]:
    """Returns culprits of these names, of the worse kind and the larger count that any rank has."""
    if not names:
        return []
    here = [held.get(name) for name in names]
    kinds = [each is not None and each.kind == "nan" for each in here]
    counts = [0 if each is None or each.count is None else each.count for each in here]
    most = torch.tensor([kinds, counts], dtype=torch.int64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return [
        Culprit(name, "nan" if nan else "inf", count or None)
        for name, nan, count in zip(names, *most.tolist(), strict=True)
    ]
