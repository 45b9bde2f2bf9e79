"""One training step of `lightning.Trainer` in FP16, against Lightning's own plugin with torch's scaler.

Claim:    with `gradscale.integrations.lightning.MixedPrecision` a step takes at most 1.02 of the time that it takes
          with Lightning's `MixedPrecision`, under torch's rule, fused or not, clipped or not.
Baseline: lightning.pytorch.plugins.precision.MixedPrecision("16-mixed", "cpu"), which does not clip with a fused
          optimizer.
Machine:  printed with the results; two CPU threads.
Command:  python benchmarks/bench_lightning.py [--quick]
Caveats:  a turn is a whole `fit` of a small network: its start, its data, and the hooks and loop of the Trainer are in
          it on both sides. No GPU was measured.
"""

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning
import torch
from alone import run_alone
from cases import timed
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from rows import Row, compared
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradscale.bench.turns import Side
from gradscale.demo.torch.gpt import GPT
from gradscale.integrations.lightning import MixedPrecision
from gradscale.torch import GradScaler

OURS, AUTO, LIGHTNING = "torch's rule", "policy auto", "Lightning's plugin"
GOAL = 1.02
WORDS, LENGTH, WIDTH, SEQUENCES = 64, 32, 64, 4


class Network(lightning.LightningModule):
    """A GPT of two blocks with 110,000 parameters, of the size that the benchmark of Accelerate has."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt, self.how = GPT(WORDS, LENGTH, WIDTH, heads=4, depth=2), how

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (text,) = batch
        logits = self.gpt(text) @ self.gpt.characters.weight.T
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), text[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind: dict[str, Any] = {self.how: True}
        return torch.optim.AdamW(self.parameters(), lr=1e-4, **kind)


def fit(make_plugin: Callable[[], Any], how: str, clip: float | None, loader: DataLoader[Any]) -> None:
    """Trains a new network for one epoch."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        plugins=[make_plugin()],
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Network(how), loader)


def sides(how: str, clip: float | None, steps: int) -> dict[str, Side]:
    """Returns the plugins that are compared, each with a whole run as its turn."""
    torch.manual_seed(0)
    text = torch.randint(WORDS, (steps * SEQUENCES, LENGTH))
    loader = DataLoader(TensorDataset(text), batch_size=SEQUENCES)
    makers: dict[str, Callable[[], Any]] = {
        LIGHTNING: partial(LightningMixedPrecision, "16-mixed", "cpu"),
        OURS: lambda: MixedPrecision(scaler=GradScaler("cpu")),
        AUTO: MixedPrecision,
    }
    return {name: Side(partial(fit, maker, how, clip, loader)) for name, maker in makers.items()}


def rows(quick: bool) -> list[Row]:
    """Returns a row for each optimizer, clipped where Lightning's plugin can."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", ".*LeafSpec")
    found: list[Row] = []
    for how, clip in (("fused", None), ("foreach", None), ("foreach", 1.0)):
        seconds = timed(partial(sides, how, clip, 20 if quick else 100), 3 if quick else 15, quick)
        name = f"AdamW {how}, {'clipped' if clip else 'not clipped'}"
        found.append(compared(f"{OURS}: {name}", LIGHTNING, seconds[OURS], seconds[LIGHTNING], GOAL))
        found.append(compared(f"{AUTO}: {name}", LIGHTNING, seconds[AUTO], seconds[LIGHTNING]))
    return found


if __name__ == "__main__":
    run_alone("A training step of Lightning", rows)
