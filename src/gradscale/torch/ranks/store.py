"""What ranks leave for each other in the store of `torch.distributed`, outside of any collective.

A collective needs every rank, and one that has failed does not come. What it leaves here, the others read when they
learn of it, each in its own time.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

PATIENCE_S = 30.0
"""How long a rank waits for others that know what it knows."""

MOST_REASONS = 8
"""Of how many ranks that have failed the reasons are read."""

LATEST = 4 * MOST_REASONS
"""How many failures are looked through for them, the newest first: a rank may have left several."""


def leave_reason(reason: str) -> None:
    """Leaves the reason for which this rank has failed."""
    store, rank = _store(), dist.get_rank()
    store.set(_reason_key(rank), reason)
    store.set(_failure_key(store.add("gradscale/failures", 1)), str(rank))


def reasons(failed: int, total: int, group: Any) -> dict[int, str]:
    """Returns the reasons of the ranks that have failed, of `MOST_REASONS` at most.

    `failed` is how many of them have, at most, and `total` the sum of their numbers. Of several, those in `group` that
    were the last to leave a reason.
    """
    store = _store()
    ranks = [total] if failed == 1 else _last_failed(min(failed, MOST_REASONS), group)
    return {rank: store.get(_reason_key(rank)).decode() for rank in sorted(ranks)}


def _last_failed(count: int, group: Any) -> list[int]:
    """Returns the `count` ranks of `group` that were the last to leave a reason, or fewer if they are not found."""
    store, members = _store(), set(_ranks_of(group))
    newest, found = store.add("gradscale/failures", 0), dict[int, None]()
    for number in range(newest, max(0, newest - LATEST), -1):
        if len(found) < count and (rank := int(store.get(_failure_key(number)))) in members:
            found[rank] = None
    return list(found)


def meet(group: Any) -> None:
    """Returns when every rank of `group` has called it, or raises if one does not come.

    Ranks that have reduced their gradients know the same of them, and come at the same time. The last to come sets the
    key that the others wait for, so that the store is asked twice by each rank, whatever their number.
    """
    members: Any = group or dist.group.WORLD
    ranks, store = members.size(), _store()
    key = f"gradscale/met/{members.group_name}"
    arrived = store.add(key, 1)
    meeting = (arrived - 1) // ranks
    if arrived % ranks == 0:
        store.set(f"{key}/{meeting}", "")
        store.delete_key(f"{key}/{meeting - 1}")  # all have left that one: they are here
        return
    try:
        store.wait([f"{key}/{meeting}"], timedelta(seconds=PATIENCE_S))
    except RuntimeError as error:
        if store.check([f"{key}/{meeting}"]):
            return
        store.add(key, -1)
        raise RuntimeError(
            "A gradient is not finite on this rank, and finite on others, although DDP has reduced it: it was "
            "written to since, on this rank alone. Edit gradients inside `scaler.unscaled(optimizer)`, on every "
            'rank, or build the scaler with `agree="always"`. This rank must not go on: the others have applied '
            "the step."
        ) from error


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _ranks_of(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def _reason_key(rank: int) -> str:
    return f"gradscale/failed/{rank}"


def _failure_key(number: int) -> str:
    return f"gradscale/failures/{number}"
