"""How much of the package a steady step enters: few enough files and functions to be read in an afternoon."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import gradscale
from gradscale.torch import GradScaler, LossScaler

pytestmark = pytest.mark.cpu_only("the rule runs later on a device")

PACKAGE = str(Path(gradscale.__file__).parent)
FILES, FUNCTIONS = 9, 45


def loss_scaler(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], object]:
    scaler = LossScaler(model)

    def step(loss: torch.Tensor) -> None:
        scaler.backward(loss)
        scaler.step(optimizer, clip_norm=1.0)

    return step


def drop_in(**settings: Any) -> Callable[[nn.Module, torch.optim.Optimizer], Callable[[torch.Tensor], object]]:
    def of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], object]:
        scaler = GradScaler("cpu", **settings)

        def step(loss: torch.Tensor) -> None:
            scaler.scale(loss).backward()
            scaler.step(optimizer, clip_norm=1.0)
            scaler.update()

        return step

    return of


def torchs_calls(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], object]:
    scaler = GradScaler("cpu")

    def step(loss: torch.Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


WAYS = {"LossScaler": loss_scaler, "drop-in": drop_in(), "auto": drop_in(policy="auto"), "torch's calls": torchs_calls}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_steady_step_with_clipping_enters_nine_files_and_forty_five_functions_at_most(way: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step, inputs = way(model, optimizer), torch.ones(4, 8)
    entered: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            entered.add((code.co_filename, f"{code.co_name} at {code.co_firstlineno}"))

    for index in range(40):
        loss = model(inputs).square().mean()
        before = sys.getprofile()
        sys.setprofile(note if index == 37 else before)
        try:
            step(loss)
        finally:
            sys.setprofile(before)
        optimizer.zero_grad()
    assert len({file for file, _ in entered}) <= FILES, sorted(entered)
    assert 20 < len(entered) <= FUNCTIONS, sorted(entered)
