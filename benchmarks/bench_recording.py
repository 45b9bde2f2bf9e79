"""What `record="run.jsonl"` adds to training, and to the disk.

Goal:     a char-GPT trains in at most 1.005 of the time, and a step takes at most 150 bytes.
Baseline: the same step without a record.
Machine:  printed with the results; one CPU thread.
Command:  python -m benchmarks.bench_recording [--quick]
Caveats:  computed, not run: half a percent is less than two runs of the same step differ. What a record adds is
          measured on a model of 16 numbers, whose hundred steps with a record and hundred without take turns with a
          step of the char-GPT; it does not depend on the model but at a skipped step. The figure is 1 + added / step.
          Writing to the disk is part of it, once in a hundred steps and in the same thread. A record has the loss as a
          tensor, the learning rate, the norm and the largest magnitude. The smallest char-GPT is shown without a goal:
          a step of it takes 4 ms, of which half a percent are 20 us. No GPU was measured.
"""

import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from benchmarks.alone import run_alone
from benchmarks.bench_torch_training import CharGPT, Training
from benchmarks.rows import Row
from benchmarks.timing import timed
from benchmarks.turns import Side
from examples.demo.data import Text, load_text
from examples.demo.with_torch import draw_from
from torch.nn.functional import cross_entropy

from gradscale.torch import LossScaler

GOAL = 1.005
BYTES = 150
STEPS = 100
TRAININGS = (
    (Training("float32", half=False, width=48, depth=2, sequences=4, length=32), None),
    (Training("FP16 autocast", half=True, width=128, depth=4, sequences=16, length=64), GOAL),
    (Training("float32", half=False, width=128, depth=4, sequences=16, length=64), GOAL),
)


def sides(training: Training, text: Text, path: Path) -> dict[str, Side]:
    """Returns a step of the GPT, and a hundred of the small model without a record and with one."""
    return {"step": Side(_step(training, text)), "plain": Side(_steps(None)), "recorded": Side(_steps(path))}


def _step(training: Training, text: Text) -> Callable[[], None]:
    torch.manual_seed(0)
    model, draw = CharGPT(training), draw_from(torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = LossScaler(model)

    def run() -> None:
        batch = torch.from_numpy(text.batch(draw, training.sequences, training.length + 1))
        with torch.autocast("cpu", dtype=torch.float16, enabled=training.half):
            logits = model(batch[:, :-1])
        scaler.backward(cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()))
        scaler.step(optimizer, clip_norm=1.0)
        optimizer.zero_grad()

    return run


def _steps(path: Path | None) -> Callable[[], None]:
    weight = torch.nn.Parameter(torch.linspace(0.1, 1.7, 16))
    optimizer = torch.optim.AdamW([weight], lr=1e-4, fused=True)
    scaler = LossScaler(record=path)

    def run() -> None:
        for _ in range(STEPS):
            loss = weight.square().sum()
            scaler.note(loss=loss, lr=1e-4)
            scaler.backward(loss)
            scaler.step(optimizer, clip_norm=1.0)
            optimizer.zero_grad()
        scaler._memory.recorder.close()

    return run


def rows(quick: bool) -> list[Row]:
    """Returns a row for each training, and one for the size of a step."""
    text, threads = load_text(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.jsonl"
            found = [
                _row(training, goal, timed(partial(sides, training, text, path), 5 if quick else 60, quick))
                for training, goal in (TRAININGS[:1] if quick else TRAININGS)
            ]
            lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.startswith(b'{"step"')]
    finally:
        torch.set_num_threads(threads)
    size = sum(map(len, lines)) / len(lines)
    return [*found, Row("record: a step on disk", "nothing", size, BYTES, unit="bytes")]


def _row(training: Training, goal: float | None, seconds: dict[str, list[float]]) -> Row:
    step, plain, recorded = (statistics.median(seconds[name]) for name in ("step", "plain", "recorded"))
    added = (recorded - plain) / STEPS
    name = f"record: GPT {training.width} wide, {training.depth} blocks, {training.name}"
    return Row(name, "no record", 1 + added / step, goal, seconds=(step + added, step), rounds=len(seconds["step"]))


if __name__ == "__main__":
    run_alone("Recording", rows)
