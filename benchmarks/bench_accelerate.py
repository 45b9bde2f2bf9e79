"""A training step inside Accelerate, and inside a Trainer of Transformers, with gradscale's scaler and with torch's.

Claim:    with `install`, a step takes at most 1.02 of the time that it takes with torch's scaler.
Baseline: the same loop with `torch.amp.GradScaler` as `accelerator.scaler`, and `native_amp` set, which Accelerate does
          by itself on a GPU.
Machine:  printed with the results; two CPU threads.
Command:  python -m benchmarks.bench_accelerate [--quick]
Caveats:  FP16 autocast on a CPU is many times slower than float32, since few processors multiply FP16 matrices: what a
          scaler adds is a smaller share of the step than on an accelerator. `Dynamic` is torch's own rule, and `auto`
          reads the sizes of gradients as well. A turn of a Trainer is one step of a running `train`, from its
          beginning to that of the next. No GPU was measured.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch
from accelerate import Accelerator
from benchmarks.alone import run_alone
from benchmarks.cases import CLIP, adamw_fused, timed
from benchmarks.rows import Row, compared
from benchmarks.stepwise import Pause, Stepwise
from benchmarks.turns import Side
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from gradscale.integrations.accelerate import install
from gradscale.integrations.transformers import install as install_in_trainer

GOAL = 1.02
TORCHS, AGAIN = "torch's GradScaler", "torch's GradScaler, again"
POLICIES = {"Dynamic": "dynamic", "auto": "auto"}
WORDS, LENGTH, SEQUENCES, FOR_EVER = 64, 32, 4, 1_000_000

Place = Callable[[Any], Any]
"""Puts a scaler into an accelerator or a trainer."""


def gpt2() -> GPT2LMHeadModel:
    """Returns a small GPT-2 without dropout."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    rest: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    drops: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **shape, **rest, **drops))


def sequences(count: int) -> list[list[int]]:
    """Returns sequences that count upwards, each in steps of its own."""
    return [[(row + place * (row % 7 + 1)) % WORDS for place in range(LENGTH)] for row in range(count)]


def place_torchs(accelerator: Accelerator) -> None:
    """Puts torch's scaler where Accelerate has it on a GPU."""
    accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu"), True


def accelerate_sides() -> dict[str, Side]:
    """Returns the loops of Accelerate, each on a model of its own."""
    ours = {name: _loop(partial(install, policy=policy)) for name, policy in POLICIES.items()}
    return {TORCHS: _loop(place_torchs)} | ours | {AGAIN: _loop(place_torchs)}


def _loop(place: Place) -> Side:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    place(accelerator)
    model = gpt2()
    model, optimizer = accelerator.prepare(model, adamw_fused(list(model.parameters())))
    rows = torch.tensor(sequences(64))
    batches = cycle(rows.split(SEQUENCES))

    def run() -> None:
        batch = next(batches)
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return Side(run)


class Paused(TrainerCallback):
    """Waits at the beginning of each step."""

    def __init__(self, pause: Pause) -> None:
        self._pause = pause

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._pause()


def trainer_sides(folder: str) -> dict[str, Side]:
    """Returns the trainers of Transformers, each with a model of its own."""
    places: dict[str, Place] = {TORCHS: _place_in_trainer, AGAIN: _place_in_trainer}
    places |= {name: partial(install_in_trainer, policy=policy) for name, policy in POLICIES.items()}
    return {name: Stepwise(partial(_train, folder, place)).side for name, place in places.items()}


def _place_in_trainer(trainer: Trainer) -> None:
    place_torchs(trainer.accelerator)


def _train(folder: str, place: Place, pause: Pause) -> None:
    arguments = TrainingArguments(
        folder,
        fp16=True,
        use_cpu=True,
        max_steps=FOR_EVER,
        per_device_train_batch_size=SEQUENCES,
        max_grad_norm=CLIP,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data: Any = [{"input_ids": ids, "labels": ids} for ids in sequences(1024)]
    trainer = Trainer(gpt2(), arguments, train_dataset=data, callbacks=[Paused(pause)])
    trainer.remove_callback(PrinterCallback)
    place(trainer)
    trainer.train()


def rows(quick: bool) -> list[Row]:
    """Returns a row for each policy, in Accelerate and in Transformers."""
    with tempfile.TemporaryDirectory() as folder:
        found = [*_compared("Accelerate", accelerate_sides, quick)]
        found += _compared("Trainer", partial(trainer_sides, folder), quick)
    return found


def _compared(name: str, sides: Callable[[], dict[str, Side]], quick: bool) -> list[Row]:
    seconds = timed(sides, 8 if quick else 1000, quick)
    return [
        compared(f"{name}: training step, GPT-2, fused, clip, {side}", TORCHS, seconds[side], seconds[TORCHS], goal)
        for side, goal in [*dict.fromkeys(POLICIES, GOAL).items(), (AGAIN, None)]
    ]


if __name__ == "__main__":
    run_alone("A training step inside Accelerate and Transformers", rows)
