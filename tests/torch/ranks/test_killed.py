"""Ranks that are killed: the others end with an error, and a new start goes on from the last checkpoint, bit-exact."""

import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
import torch.distributed as dist
from tests.torch.ranks.faults import Fault, Injection, draw_faults
from tests.torch.ranks.gpt import EXACT, GPT, batch_of
from tests.torch.ranks.launch import Ranks, run_ranks
from tests.torch.ranks.layouts import LAYOUTS, case
from tests.torch.ranks.soak import Run, places_of
from tests.torch.ranks.whole import digest_of, whole_state
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from gradscale.torch import LossScaler

pytestmark = pytest.mark.cpu_only("gloo, which has no other device")

Moment = Literal["forward", "backward", "step", "update", "save"]
SAVE_EVERY = 4
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class Death:
    """When a rank kills itself: during the forward or backward pass, before `step`, inside it, or while it saves."""

    rank: int
    step: int
    moment: Moment

    def at(self, step: int, moment: Moment) -> None:
        if dist.get_rank() == self.rank and step >= self.step and moment == self.moment:
            os.kill(os.getpid(), signal.SIGKILL)


NEVER = Death(-1, 0, "forward")


def train(layout: str, steps: int, faults: dict[int, Fault], checkpoint: Path, death: Death) -> tuple[list[Any], str]:
    """Trains from the checkpoint, if there is one, to the end.

    Returns step, status and scale of each step, and a digest of everything at the end.
    """
    rank, parts = dist.get_rank(), LAYOUTS[layout].parts
    model = LAYOUTS[layout].spread(GPT(EXACT))
    run = Run("LossScaler", steps, faults)
    optimizer, scaler, injection = run.optimizer(model), LossScaler(model, run.policy), Injection(faults, rank)
    first = load(model, optimizer, scaler, checkpoint) if checkpoint.exists() else 0
    step, found = first, []
    optimizer.register_step_pre_hook(lambda *_: death.at(step, "update"))
    for step in range(first, steps):
        inputs, targets = batch_of(step, LAYOUTS[layout].part(rank), parts)
        death.at(step, "forward")
        logits = model(inputs)
        logits.register_hook(lambda _, step=step: death.at(step, "backward"))
        scaler.backward(injection.loss(step, EXACT.loss, logits, targets))
        injection.into_gradients(step, model)
        death.at(step, "step")
        result = scaler.step(optimizer, norm=True)
        optimizer.zero_grad()
        found.append((step, str(result.status()), result.next_scale.item()))
        if (step + 1) % SAVE_EVERY == 0:
            save(step + 1, model, optimizer, scaler, checkpoint, death)
    return found, digest_of(whole_state(model, optimizer), scaler.state_dict())


def save(
    step: int, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: LossScaler, path: Path, death: Death
) -> None:
    """Replaces the checkpoint by a new one, or leaves it as it was."""
    weights, state = get_state_dict(model, optimizer, options=WHOLE)
    if dist.get_rank() == 0:
        contents = {"step": step, "model": weights, "optimizer": state, "scaler": scaler.state_dict()}
        torch.save(contents, path.with_suffix(".new"))
        death.at(step, "save")
        path.with_suffix(".new").replace(path)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: LossScaler, path: Path) -> int:
    """Loads a checkpoint on this rank, and returns how many steps were made before it."""
    contents = torch.load(path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=contents["model"],
        optim_state_dict=contents["optimizer"],
        options=WHOLE,
    )
    scaler.load_state_dict(contents["scaler"])
    return contents["step"]


def check_resumes(layout: str, kills: int, folder: Path) -> None:
    """Kills a random rank at a random step, again and again; then lets the run finish."""
    draw, checkpoint = random.Random(kills), folder / "checkpoint.pt"
    steps = 8 * kills + 8
    faults = draw_faults(steps, 2, places_of(layout, "LossScaler"), every=4)
    for kill in range(kills):
        first = torch.load(checkpoint)["step"] if checkpoint.exists() else 0
        moment: Moment = draw.choice(get_args(Moment))
        death = Death(0 if moment == "save" else draw.randrange(2), first + draw.randrange(8), moment)
        ranks = Ranks(2, train, (layout, steps, faults, checkpoint, death), folder / f"kill {kill}")
        codes = ranks.wait()
        assert codes[death.rank] == -signal.SIGKILL, ranks.output(death.rank)
        survivor = 1 - death.rank
        assert codes[survivor] == 1, ranks.output(survivor)
        assert "RuntimeError" in ranks.output(survivor)
    resumed = run_ranks(2, train, layout, steps, faults, checkpoint, NEVER, folder=folder / "resumed")
    undisturbed = run_ranks(2, train, layout, steps, faults, folder / "other.pt", NEVER, folder=folder / "undisturbed")
    for (ending, end), (all_steps, other_end) in zip(resumed, undisturbed, strict=True):
        assert ending == all_steps[-len(ending) :]
        assert end == other_end
    assert resumed[0] == resumed[1]


@pytest.mark.parametrize("layout", [case("DDP on 2"), case("FSDP2 on 2")])
def test_a_killed_rank_ends_the_others_and_a_new_start_resumes_bit_exactly(layout: str, tmp_path: Path) -> None:
    check_resumes(layout, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [case("DDP on 2"), case("FSDP2 on 2")])
def test_ranks_are_killed_ten_times_and_resume_bit_exactly(layout: str, tmp_path: Path) -> None:
    check_resumes(layout, 10, tmp_path)
