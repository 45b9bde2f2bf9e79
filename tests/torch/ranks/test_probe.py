"""A probe on several ranks: all of them run the same steps, and each names what it holds."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.ranks.launch import run_ranks
from torch import Tensor, nn

from gradscale import Static
from gradscale.torch import LossScaler
from gradscale.torch.gradients import local


def spread(name: str, model: nn.Module) -> Any:
    if name == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)


def probed(name: str, fault: str) -> tuple[str, str | None, int | None, str | None]:
    """Returns verdict, tensor, halvings and operation of a probe on this rank. Rank 1 has the fault."""
    torch.manual_seed(0)
    model = spread(name, nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    x = torch.ones(4, 4)
    if dist.get_rank() == 1 and fault == "input":
        x[0] = math.inf
    if dist.get_rank() == 1 and fault == "weight":
        with torch.no_grad():
            last = list(model.parameters())[-1]
            local(last)[-1] = math.nan
    high = 2.0 ** {"scale": 140, "loss": 120}.get(fault, 4)
    weight = 2.0**20 if dist.get_rank() == 1 and fault == "loss" else 1.0

    def step() -> Tensor:
        return model(x).square().mean() * weight

    report = LossScaler(model, Static(2.0**100)).probe(step, scale=high)
    for _ in range(2):  # and the ranks still train together
        model(x).sum().backward()
    return report.verdict.value, report.tensor, report.halvings, report.operation and report.operation.name


@pytest.mark.parametrize("name", ["DDP", "FSDP2"])
def test_a_scale_that_is_too_high_is_found_by_all_ranks(name: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, probed, name, "scale", folder=tmp_path)
    assert first == second
    assert first[0] == "scale_too_high"
    assert first[3] == "mul", "not what reads the gradients after the ranks have reduced them"


@pytest.mark.parametrize("name", ["DDP", "FSDP2"])
def test_an_input_that_is_not_finite_is_named_on_its_rank(name: str, tmp_path: Path) -> None:
    _, second = run_ranks(2, probed, name, "input", folder=tmp_path)
    assert second[0] == "broken_data"
    assert second[1].startswith("an input, float32 of shape [4, 4]")


def test_gradients_that_overflow_on_one_rank_alone_are_found_there(tmp_path: Path) -> None:
    """The other runs the same steps, and finds its own gradients finite."""
    first, second = run_ranks(2, probed, "DDP", "loss", folder=tmp_path)
    assert first[0] == "finite"
    assert second[0] == "scale_too_high"
    assert first[2] == second[2]


def test_a_weight_that_is_not_finite_is_named_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(2, probed, "FSDP2", "weight", folder=tmp_path)
    assert first[:2] == second[:2] == ("broken_weights", "2.bias")


def trained(name: str, fault: str) -> tuple[list[bool], str | None, list[str]]:
    """Returns which steps were skipped, the verdict of the automatic probe, and what is logged. Rank 1 is at fault."""
    torch.manual_seed(0)
    model = spread(name, nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    scaler, optimizer = LossScaler(model, Static(2.0**10)), torch.optim.SGD(model.parameters(), lr=1e-2)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradscale.torch.probing.automatic").addHandler(handler)
    x = torch.ones(4, 4)

    def step() -> Tensor:
        if fault == "raises" and dist.get_rank() == 1:
            raise KeyError("no batch")
        return model(x).square().mean()

    scaler.probe_after(2, step)
    skipped: list[bool] = []
    for number in range(8):
        x = torch.ones(4, 4)
        if dist.get_rank() == 1 and number in (1, 2, 5, 6):
            x[0] = math.inf
        scaler.backward(step() if fault != "raises" else model(x).square().mean())
        skipped.append(scaler.step(optimizer).skipped())
        optimizer.zero_grad()
    verdict = None if scaler.last_probe is None else scaler.last_probe.verdict.value
    return skipped, verdict, [line.partition(": ")[2].partition(":")[0] or line for line in lines]


SKIPPED = [number in (1, 2, 5, 6) for number in range(8)]


@pytest.mark.parametrize("name", ["DDP", "FSDP2"])
def test_ranks_probe_together_and_the_one_at_fault_logs_it(name: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, trained, name, "input", folder=tmp_path)
    assert first == (SKIPPED, "finite", [])
    assert second == (SKIPPED, "broken_data", ["broken_data"])


def test_a_step_that_raises_on_one_rank_leaves_no_other_waiting(tmp_path: Path) -> None:
    first, second = run_ranks(2, trained, "DDP", "raises", folder=tmp_path)
    assert first == (SKIPPED, None, [])
    assert second == (SKIPPED, None, ["its step raised an error."])
