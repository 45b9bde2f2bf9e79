"""Threads that train side by side."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

import torch

R = TypeVar("R")


class Stopped(Exception):
    """Raised in a worker when nobody waits for its result any more."""


class Workers:
    """As many threads as torch would use for one operation, each of which computes alone.

    FP16 on a CPU is slow and its operations here are small: sharing one between two cores gains nothing, and on a busy
    machine it costs dearly. On an accelerator there is one worker.

    Args:
        device: where they compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads if device.type == "cpu" else 1)
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        torch.set_num_threads(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Waits until all is done; stops everything first if there was an error, such as Ctrl-C."""
        if error is not None:
            self._stopped.set()
        self._pool.shutdown(cancel_futures=error is not None)
        torch.set_num_threads(self._threads)

    def submit(self, work: Callable[[], R]) -> "Future[R]":
        """Queues some work."""
        return self._pool.submit(work)

    def check(self) -> None:
        """Raises `Stopped` if the work is no longer wanted. To be called now and then by whoever works."""
        if self._stopped.is_set():
            raise Stopped
