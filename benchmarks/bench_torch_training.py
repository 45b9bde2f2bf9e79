"""A whole training step of a small GPT with loss scaling, against the same with none.

Claim:    forward, backward, clip and step take at most 1.01 of the time with `LossScaler` that they take without.
Baseline: the same loop on a copy of the model: backward, clip_grad_norm_, step.
Machine:  printed with the results; two CPU threads.
Command:  python -m benchmarks.bench_torch_training [--quick]
Caveats:  FP16 autocast on a CPU is many times slower than float32, since few processors multiply FP16 matrices. Its
          model is smaller, and what the scaler adds is a smaller share of the step than on an accelerator. In float32
          nothing needs scaling: that row shows the cost of the scaler beside fast arithmetic. Both sides see the same
          batches. The policy is the default, `Headroom`. The third model is so small that fixed costs show. No GPU
          was measured.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from benchmarks.alone import run_alone
from benchmarks.cases import CLIP, adamw_fused, timed
from benchmarks.rows import Row, compared
from benchmarks.turns import Side
from examples.demo.data import VOCABULARY, Text, load_text
from examples.demo.with_torch import GPT, draw_from
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradscale.torch import LossScaler

GOAL = 1.01
OURS, BARE = "LossScaler", "no scaling"


@dataclass(frozen=True)
class Training:
    """A model and its batches.

    Attributes:
        name: the arithmetic, as the table calls it.
        half: run the model under FP16 autocast.
        width: numbers per position.
        depth: blocks.
        sequences: texts in a batch.
        length: characters of each.
    """

    name: str
    half: bool
    width: int
    depth: int
    sequences: int
    length: int


class CharGPT(nn.Module):
    """A GPT that predicts the next character.

    Args:
        training: says how large it is.
    """

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.trunk = GPT(len(VOCABULARY), training.length, training.width, heads=4, depth=training.depth)
        self.head = nn.Linear(training.width, len(VOCABULARY), bias=False)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.trunk(text))


TRAININGS = (
    Training("float32", half=False, width=256, depth=4, sequences=16, length=64),
    Training("FP16 autocast", half=True, width=128, depth=4, sequences=4, length=64),
    Training("FP16 autocast", half=True, width=64, depth=2, sequences=4, length=32),
)


def sides(training: Training, text: Text) -> dict[str, Side]:
    """Returns the two loops, on copies of one model."""
    torch.manual_seed(0)
    model = CharGPT(training)
    return {
        BARE: _side(training, text, copy.deepcopy(model), _plain_step),
        OURS: _side(training, text, model, _scaled_step),
    }


Finish = Callable[[Tensor], None]
"""Takes the loss, and runs its backward pass, clips and steps."""


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Finish:
    def finish(loss: Tensor) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return finish


def _scaled_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Finish:
    scaler = LossScaler(model)

    def finish(loss: Tensor) -> None:
        scaler.backward(loss)
        scaler.step(optimizer, clip_norm=CLIP)

    return finish


def _side(
    training: Training,
    text: Text,
    model: nn.Module,
    make_finish: Callable[[nn.Module, torch.optim.Optimizer], Finish],
) -> Side:
    """Returns a side whose turn is one training step. Drawing the batch is not timed."""
    draw = draw_from(torch.Generator().manual_seed(1))
    optimizer = adamw_fused(list(model.parameters()))
    finish = make_finish(model, optimizer)
    batch = torch.empty(0)

    def prepare() -> None:
        nonlocal batch
        batch = torch.from_numpy(text.batch(draw, training.sequences, training.length + 1))

    def run() -> None:
        with torch.autocast("cpu", dtype=torch.float16, enabled=training.half):
            logits = model(batch[:, :-1])
        finish(cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()))
        optimizer.zero_grad()

    return Side(run, prepare)


def rows(quick: bool) -> list[Row]:
    """Returns a row for each training."""
    text = load_text()
    found: list[Row] = []
    for training in TRAININGS:
        seconds = timed(partial(sides, training, text), 8 if quick else 96, quick)
        parameters = sum(parameter.numel() for parameter in CharGPT(training).parameters())
        name = f"training step: GPT of {parameters / 1e6:.1f}M, {training.name}"
        found.append(compared(name, BARE, seconds[OURS], seconds[BARE], GOAL))
    return found


if __name__ == "__main__":
    run_alone("A whole training step", rows)
