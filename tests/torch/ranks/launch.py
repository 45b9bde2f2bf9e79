"""Starts the ranks of a process group, each in a process of its own, and collects what they return."""

import multiprocessing
import multiprocessing.connection
import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.torch.process_group import end_process_group

TIMEOUT = timedelta(seconds=60)
"""Of every collective. A rank that waits for one that has failed ends by then."""
LIMIT_S = 900
"""Of a whole run. A rank that is still there after it is killed, and the run has failed."""

# Ranks are forked from a process that has imported torch already: that takes seconds for each rank otherwise.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "gradscale.torch"]
)


class Ranks:
    """The processes of one start.

    Attributes:
        processes: one for each rank, in order.
        folder: where they write what they return and print.
    """

    def __init__(self, world: int, function: Callable[..., Any], arguments: tuple[Any, ...], folder: Path) -> None:
        """Starts `function(*arguments)` on every rank of a group of `world`. `folder` must be empty, or not exist."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.processes = [
            CONTEXT.Process(target=_work, args=(rank, world, folder, function, arguments)) for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def wait(self) -> list[int | None]:
        """Waits for all ranks, and returns their exit codes: None for one that did not end and was killed."""
        running, left_s = list(self.processes), LIMIT_S
        while running and multiprocessing.connection.wait([process.sentinel for process in running], left_s):
            running = [process for process in running if process.is_alive()]
            if any(process.exitcode for process in self.processes):
                left_s = 2 * int(TIMEOUT.total_seconds())
        for process in running:
            process.kill()
        for process in self.processes:
            process.join()
        return [None if process in running else process.exitcode for process in self.processes]

    def output(self, rank: int) -> str:
        """Returns what a rank printed, such as the traceback that ended it."""
        return (self.folder / f"{rank}.log").read_text()

    def results(self) -> list[Any]:
        """Returns what every rank returned; raises if one of them failed."""
        codes = self.wait()
        if any(codes):
            outputs = [f"rank {rank}, exit code {code}:\n{self.output(rank)}" for rank, code in enumerate(codes)]
            raise AssertionError("\n".join(outputs))
        # Written by these processes a moment ago.
        return [pickle.loads((self.folder / f"{rank}.pickle").read_bytes()) for rank in range(len(codes))]


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, folder: Path) -> list[Any]:
    """Returns what `function(*arguments)` returns on every rank of a group of `world`."""
    return Ranks(world, function, arguments, folder).results()


def _work(rank: int, world: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    with (folder / f"{rank}.log").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=TIMEOUT)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(function(*arguments)))
    dist.barrier()
    end_process_group()
