"""Runs of a study in several processes, each of which has one thread."""

import gc
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from benchmarks.study.training import Case, run

Row = dict[str, Any]


class Workers:
    """Processes that run cases, started when they are needed.

    Args:
        count: how many there may be.
        run: returns the row of a case.

    Attributes:
        busy: what is being run, by the connection to the process that runs it.
    """

    # Not a `ProcessPoolExecutor`, which may wait for ever once its processes were ended.

    def __init__(self, count: int, run: Callable[[Case], Row]) -> None:
        self.busy: dict[Connection, Case] = {}
        self._count, self._run = count, run
        # Spawned: a copy of a process in which torch has started threads may hang.
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._idle: list[Connection] = []

    @property
    def free(self) -> bool:
        """Whether another case can be started."""
        return len(self.busy) < self._count

    def start(self, case: Case) -> None:
        """Starts to run a case."""
        connection = self._idle.pop() if self._idle else self._new()
        connection.send(case)
        self.busy[connection] = case

    def finished(self) -> list[Connection]:
        """Waits until at least one run has ended, and returns the connections of those that have."""
        return [each for each in wait(self.busy) if isinstance(each, Connection)]

    def take(self, connection: Connection) -> tuple[Case, Row]:
        """Returns a case and its row."""
        case = self.busy.pop(connection)
        try:
            row = connection.recv()
        except EOFError:
            raise RuntimeError(
                f"The process that ran a case has ended; see its error above. Case: {case.key}."
            ) from None
        self._idle.append(connection)
        return case, row

    def end(self) -> None:
        """Ends all processes, and gives up what they run."""
        for process in self._processes:
            process.terminate()
            process.join()

    def _new(self) -> Connection:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._run), daemon=True)
        process.start()
        theirs.close()  # so that each side sees when the other has ended
        self._processes.append(process)
        return ours


def run_all(
    cases: Iterable[Case], workers: int, end: float, run: Callable[[Case], Row] = run
) -> Iterator[tuple[Case, Row]]:
    """Yields each case and its row as soon as it has been run, in any order.

    A row depends on its case alone, and not on the number of processes. Ctrl-C starts no further run, and yields the
    rows of those in progress; a second one gives them up.

    Args:
        cases: what to run. Taken one by one, when a process is free.
        workers: number of processes.
        end: the time of `time.monotonic` from which on none is started.
        run: returns the row of a case.
    """
    pool, waiting = Workers(workers, run), iter(cases)
    try:
        while True:
            try:
                while pool.free and time.monotonic() < end and (case := next(waiting, None)):
                    pool.start(case)
                if not pool.busy:
                    return
                finished = pool.finished()
            except KeyboardInterrupt:
                if end == 0:
                    raise
                end = 0
                print(f"Stopping after {len(pool.busy)} runs in progress. Ctrl-C again gives them up.", file=sys.stderr)
                continue
            for connection in finished:
                yield pool.take(connection)
    finally:
        pool.end()


def _serve(connection: Connection, run: Callable[[Case], Row]) -> None:
    """Runs the cases that come, until the process that sends them has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that writes the rows
    torch.set_num_threads(1)
    gc.set_threshold(20_000)
    try:
        while True:
            case = connection.recv()
            # The modules that are loaded by now are not searched for garbage, which would take a tenth of a run.
            gc.collect()
            gc.freeze()
            connection.send(run(case))
    except (EOFError, BrokenPipeError):
        return
