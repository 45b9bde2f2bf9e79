"""What `watch` adds to training when it samples one step in a hundred.

Goal:     amortized over 100 steps, a char-GPT trains in at most 1.01 of the time.
Baseline: the same loop without `watch`.
Machine:  printed with the results; one CPU thread.
Command:  python -m benchmarks.bench_torch_watch [--quick]
Caveats:  computed, not run: a loop that is watched at every step and one that is not watched take turns, and the figure
          is 1 + (sampled - plain) / plain / 100. Between samples nothing is left to measure: no hook is on the model.
          A step of the smallest model takes 4 ms, and its sample counts 100 tensors of 550,000 numbers in about as much
          time again, so that it has little to spare under the goal. Only counting is measured, not `rows()`, which
          computes what formats lose when it is called. No GPU was measured.
"""

import statistics
from functools import partial

import torch
from benchmarks.alone import run_alone
from benchmarks.bench_torch_training import CharGPT, Training
from benchmarks.rows import Row
from benchmarks.timing import timed
from benchmarks.turns import Side
from examples.demo.data import Text, load_text
from examples.demo.with_torch import draw_from
from torch.nn.functional import cross_entropy

from gradscale.torch import LossScaler, watch

GOAL = 1.01
EVERY = 100
TRAININGS = (
    Training("FP16 autocast", half=True, width=48, depth=2, sequences=4, length=32),
    Training("float32", half=False, width=48, depth=2, sequences=4, length=32),
    Training("float32", half=False, width=128, depth=4, sequences=16, length=64),
)


def sides(training: Training, text: Text) -> dict[str, Side]:
    """Returns a step of a loop that is not watched, and one of a loop that is watched at every step."""
    return {"plain": _side(training, text, watched=False), "sampled": _side(training, text, watched=True)}


def _side(training: Training, text: Text, *, watched: bool) -> Side:
    torch.manual_seed(0)
    model, draw = CharGPT(training), draw_from(torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = LossScaler(model)
    record = watch(model, scaler, every=1) if watched else None

    def run() -> None:
        batch = torch.from_numpy(text.batch(draw, training.sequences, training.length + 1))
        with torch.autocast("cpu", dtype=torch.float16, enabled=training.half):
            logits = model(batch[:, :-1])
        scaler.backward(cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()))
        scaler.step(optimizer)
        optimizer.zero_grad()
        if record is not None:
            record.clear()

    return Side(run)


def rows(quick: bool) -> list[Row]:
    """Returns a row for each training."""
    text, threads = load_text(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            _row(training, timed(partial(sides, training, text), 5 if quick else 60, quick)) for training in TRAININGS
        ]
    finally:
        torch.set_num_threads(threads)


def _row(training: Training, seconds: dict[str, list[float]]) -> Row:
    sampled, plain = statistics.median(seconds["sampled"]), statistics.median(seconds["plain"])
    name = f"watch, 1 step in {EVERY}: GPT {training.width} wide, {training.depth} blocks, {training.name}"
    amortized = 1 + (sampled - plain) / plain / EVERY
    return Row(name, "not watched", amortized, GOAL, seconds=(sampled, plain), rounds=len(seconds["plain"]))


if __name__ == "__main__":
    run_alone("Watching", rows)
