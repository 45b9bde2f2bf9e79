"""How often ranks wait for each other in a step, counted; and what is sent to no one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from tests.torch.helpers import INF, NAN
from tests.torch.ranks.gpt import GPT, ROUNDED, batch_of
from tests.torch.ranks.launch import run_ranks
from tests.torch.ranks.layouts import LAYOUTS, needs_sharding
from tests.torch.versions import SHARDS_ON_CPU

from gradscale import Dynamic, Policy
from gradscale.policies.headroom import Headroom
from gradscale.torch import LossScaler

CASES: list[tuple[str, Literal["auto", "always"], Policy, float | None, bool]] = [
    ("DDP on 2", "auto", Dynamic(), None, False),
    ("DDP on 2", "auto", Dynamic(), 1.0, True),
    ("DDP on 2", "auto", Headroom(), 1.0, False),
    ("DDP on 2", "always", Dynamic(), 1.0, False),
    ("FSDP2 on 2", "auto", Dynamic(), None, False),
    ("FSDP2 on 2", "auto", Dynamic(), 1.0, True),
    ("FSDP2 on 2", "auto", Headroom(), 1.0, False),
    ("TP on 2", "auto", Dynamic(), 1.0, False),
]
CASES = [case for case in CASES if SHARDS_ON_CPU or not needs_sharding(case[0])]
FIRST, CLEAN, BAD_LOSS, BAD_BACKWARD, LAST = range(5)


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


def rounds_of(
    name: str, agree: Literal["auto", "always"], policy: Policy, clip: float | None, fused: bool
) -> list[tuple[str, list[str], float, int]]:
    """Returns the status, the rounds, the next scale and the number of culprits of each step."""
    layout, rank = LAYOUTS[name], dist.get_rank()
    model = layout.spread(GPT(ROUNDED))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = LossScaler(model, policy, agree=agree)
    found: list[tuple[str, list[str], float, int]] = []
    for step in range(5):
        inputs, targets = batch_of(step, layout.part(rank), layout.parts)
        loss = ROUNDED.loss(model(inputs), targets)
        if step == BAD_LOSS and rank == 1:
            loss = loss.detach() * NAN + loss  # not finite, and its gradients are
        if step == BAD_BACKWARD and rank == 0:
            loss.register_hook(lambda grad: grad * INF)
        scaler.backward(loss)
        with counting() as begun:
            result = scaler.step(optimizer, clip_norm=clip)
        optimizer.zero_grad()
        found.append((str(result.status()), begun, result.next_scale.item(), len(result.culprits())))
    return found


def on_ranks() -> list[Any]:
    return [rounds_of(*case) for case in CASES]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("rounds") / "ranks"
    return run_ranks(2, on_ranks, folder=folder)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_a_clean_step_has_one_round_and_under_ddp_none(number: int, reports: list[Any]) -> None:
    name, agree, *_ = CASES[number]
    quiet = name.startswith("DDP") and agree == "auto"
    for steps in (report[number] for report in reports):
        assert [status for status, *_ in steps] == ["applied", "applied", "nonfinite_loss", "overflow", "applied"]
        assert steps[FIRST][1] == ["all_reduce"], "the first step compares the scales"
        for step in (CLEAN, LAST):
            assert steps[step][1] == ([] if quiet else ["all_reduce"])
        for step in (BAD_LOSS, BAD_BACKWARD):
            names = ["broadcast", "all_reduce", "all_reduce"] if steps[step][3] else []
            assert steps[step][1] == ["all_reduce", "all_reduce", *names], "whose loss it was, and which parameters"


def test_ranks_have_the_same_scales_and_name_the_same_number_of_parameters(reports: list[Any]) -> None:
    assert reports[0] == reports[1]
