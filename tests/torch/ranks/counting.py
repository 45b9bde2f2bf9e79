"""Counts how often a rank waits for others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def counting() -> Iterator[list[str]]:
    """Lists the rounds that are begun: collectives that are on their way at the same time are one."""
    begun: list[str] = []
    pending: set[int] = set()
    all_reduce, broadcast = dist.all_reduce, dist.broadcast

    def counted(tensor: Any, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if not pending:
            begun.append("all_reduce")
        work = all_reduce(tensor, *args, async_op=True, **kwargs)
        pending.add(id(work))
        return Counted(work) if async_op else Counted(work).wait()

    class Counted:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            pending.discard(id(self.work))
            self.work.wait()

    def counted_broadcast(*args: Any, **kwargs: Any) -> None:
        begun.append("broadcast")
        broadcast(*args, **kwargs)

    dist.all_reduce, dist.broadcast = counted, counted_broadcast
    try:
        yield begun
    finally:
        dist.all_reduce, dist.broadcast = all_reduce, broadcast
