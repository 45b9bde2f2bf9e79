"""Threads that train in parallel, or the caller's thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

R = TypeVar("R")


class Stopped(Exception):
    """Raised in a worker whose result is no longer needed."""


class Workers:
    """A pool of threads that an error, such as Ctrl-C, stops.

    Args:
        threads: how many; 0 computes in the caller's thread, as the work is submitted.
    """

    def __init__(self, threads: int = 0) -> None:
        self._pool = ThreadPoolExecutor(threads) if threads else None
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Returns when all work is done. After an error the work is stopped first."""
        if error is not None:
            self._stopped.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=error is not None)

    def submit(self, work: Callable[[], R]) -> "Future[R]":
        """Queues some work."""
        if self._pool is not None:
            return self._pool.submit(work)
        done: Future[R] = Future()
        done.set_result(work())
        return done

    def check(self) -> None:
        """Raises `Stopped` if the work is no longer needed. Long work calls this regularly."""
        if self._stopped.is_set():
            raise Stopped
