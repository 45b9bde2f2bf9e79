"""What ranks leave for each other in the store of `torch.distributed`, outside of any collective.

A collective needs every rank, and one that has failed does not come. What it leaves here, the others read when they
learn of it, each in its own time.
"""

import time
from itertools import count
from typing import Any

import torch.distributed as dist

PATIENCE_S = 30.0
"""How long a rank waits for others that know what it knows."""

_MEETINGS = count()


def leave_reason(reason: str) -> None:
    """Leaves the reason for which this rank has failed."""
    _store().set(_key(dist.get_rank()), reason)


def reasons(failed: int, total: int, group: Any) -> dict[int, str]:
    """Returns the reasons of the ranks that have failed.

    `failed` is how many of them have, and `total` the sum of their numbers: of several ranks all that have ever left a
    reason are returned.
    """
    ranks = [total] if failed == 1 else dist.get_process_group_ranks(group or dist.group.WORLD)
    store = _store()
    return {rank: store.get(_key(rank)).decode() for rank in ranks if store.check([_key(rank)])}


def meet(group: Any) -> None:
    """Returns when every rank of `group` has called it, or raises if one does not come.

    Ranks that have reduced their gradients know the same of them, and come at the same time.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    key, store = f"gradscale/met/{len(ranks)}/{ranks[0]}/{next(_MEETINGS)}", _store()
    store.add(key, 1)
    deadline = time.monotonic() + PATIENCE_S
    while store.add(key, 0) < len(ranks):
        if time.monotonic() > deadline:
            raise RuntimeError(
                "A gradient is not finite on this rank, and finite on others, although DDP has reduced it: it was "
                "written to since, on this rank alone. Edit gradients inside `scaler.unscaled(optimizer)`, on every "
                'rank, or build the scaler with `agree="always"`. This rank must not go on: the others have applied '
                "the step."
            )
        time.sleep(0.001)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _key(rank: int) -> str:
    return f"gradscale/failed/{rank}"
