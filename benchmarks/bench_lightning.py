"""One training step of `lightning.Trainer` in FP16, against Lightning's own plugin with torch's scaler.

Claim:    with `gradscale.integrations.lightning.MixedPrecision` a step takes at most 1.02 of the time that it takes
          with Lightning's `MixedPrecision`, under torch's rule and under `auto`, fused or not, clipped or not.
Baseline: lightning.pytorch.plugins.precision.MixedPrecision("16-mixed", "cpu"), which does not clip with a fused
          optimizer.
Machine:  printed with the results; two CPU threads.
Command:  python -m benchmarks.bench_lightning [--quick]
Caveats:  a turn is one step of a running `fit`, from the beginning of a batch to that of the next: the hooks and the
          loop of the Trainer are in it on both sides, and the start of the run is not. FP16 autocast on a CPU is many
          times slower than float32, so that a scaler is a smaller share of the step than on an accelerator. No GPU was
          measured.
"""

import logging
import warnings
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import lightning
import torch
from benchmarks.alone import run_alone
from benchmarks.cases import timed
from benchmarks.rows import Row, compared
from benchmarks.stepwise import Pause, Stepwise
from benchmarks.turns import Side
from examples.demo.with_torch import GPT
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from torch import Tensor, nn

from gradscale.integrations.lightning import MixedPrecision
from gradscale.torch import GradScaler

OURS, AUTO, LIGHTNING, AGAIN = "torch's rule", "policy auto", "Lightning's plugin", "Lightning's plugin, again"
GOAL = 1.02
WORDS, LENGTH, WIDTH, SEQUENCES, BATCHES = 64, 32, 64, 4, 16

MakePlugin = Callable[[], Any]


class Network(lightning.LightningModule):
    """A GPT of two blocks with 110,000 parameters, of the size that the benchmark of Accelerate has."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt, self.how = GPT(WORDS, LENGTH, WIDTH, heads=4, depth=2), how

    def training_step(self, text: Tensor, index: int) -> Tensor:
        logits = self.gpt(text) @ self.gpt.characters.weight.T
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), text[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind: dict[str, Any] = {self.how: True}
        return torch.optim.AdamW(self.parameters(), lr=1e-4, **kind)


class Paused(lightning.Callback):
    """Waits at the beginning of each batch."""

    def __init__(self, pause: Pause) -> None:
        self._pause = pause

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._pause()


def fit(make_plugin: MakePlugin, how: str, clip: float | None, pause: Pause) -> None:
    """Trains a new network for ever."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[Paused(pause)],
        plugins=[make_plugin()],
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    network = Network(how)
    text = torch.randint(WORDS, (BATCHES, SEQUENCES, LENGTH))
    trainer.fit(network, cycle(text.unbind()))


def sides(how: str, clip: float | None) -> dict[str, Side]:
    """Returns the plugins that are compared, each in a run of its own."""
    makers: dict[str, MakePlugin] = {
        LIGHTNING: partial(LightningMixedPrecision, "16-mixed", "cpu"),
        OURS: lambda: MixedPrecision(scaler=GradScaler("cpu")),
        AUTO: MixedPrecision,
        AGAIN: partial(LightningMixedPrecision, "16-mixed", "cpu"),
    }
    return {name: Stepwise(partial(fit, maker, how, clip)).side for name, maker in makers.items()}


def rows(quick: bool) -> list[Row]:
    """Returns a row for each optimizer, clipped where Lightning's plugin can."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", ".*LeafSpec")
    found: list[Row] = []
    for how, clip in (("fused", None), ("foreach", None), ("foreach", 1.0)):
        seconds = timed(partial(sides, how, clip), 8 if quick else 1000, quick)
        name = f"AdamW {how}, {'clipped' if clip else 'not clipped'}"
        for side, goal in ((OURS, GOAL), (AUTO, GOAL), (AGAIN, None)):
            found.append(compared(f"{side}: {name}", LIGHTNING, seconds[side], seconds[LIGHTNING], goal))
    return found


if __name__ == "__main__":
    run_alone("A training step of Lightning", rows)
