"""Compares the scales of a run that clips with those of the same run without clipping.

Claim:    with `clip_norm`, `auto` has at every step a scale within 1 bit of the one it has without, and skips no more
          steps. Clipping needs the norm; the largest magnitude that `Headroom` follows is then read every 16th step,
          and estimated from the norm in between.
Baseline: the same run without clipping, where the largest magnitude is read at every step.
Machine:  any; only scales are compared.
Command:  python -m benchmarks.bench_torch_clip_scale [--quick]
Caveats:  the bound is so high that it never clips, so that both runs see the same gradients. Small models; FP16 by
          autocast on the CPU.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from benchmarks.alone import QUICK
from benchmarks.rows import Row
from benchmarks.table import print_table
from examples.demo.with_torch import GPT
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradscale.torch import LossScaler

NEVER_CLIPS = 1e30

CLOSE = 1.0
"""Bits between two scales that count as the same."""


@dataclass(frozen=True)
class Case:
    """A model, its data and how long it is trained."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Generator], Tensor]
    steps: int


def mlp(width: int) -> nn.Module:
    """Returns three layers of one width, and a head."""
    layers = [nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*layers)


def cnn() -> nn.Module:
    """Returns a small network with batch normalization."""
    layers: list[nn.Module] = []
    for channels_in, channels_out in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class Language(nn.Module):
    """A small GPT with a head for the next of 64 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = GPT(64, 32, 64, heads=4, depth=2)
        self.head = nn.Linear(64, 64, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.trunk(text))


def classified(shape: tuple[int, ...]) -> Callable[[nn.Module, torch.Generator], Tensor]:
    """Returns the loss of a batch of 32 inputs of this shape, whose class is a fixed function of the input."""

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        x = torch.randn(32, *shape, generator=generator)
        target = (x.flatten(1)[:, :4] > 0).long() @ torch.tensor([1, 2, 4, 1])
        return cross_entropy(model(x).float(), target)

    return loss


def language(model: nn.Module, generator: torch.Generator) -> Tensor:
    """Returns the loss of 16 sequences in which each character is 3 times the last, plus 0 or 1."""
    text = [torch.randint(64, (16,), generator=generator)]
    for _ in range(32):
        text.append((text[-1] * 3 + torch.randint(2, (16,), generator=generator)) % 64)
    sequences = torch.stack(text, dim=1)
    logits = model(sequences[:, :-1]).float()
    return cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


def cases(quick: bool) -> Iterator[Case]:
    """Yields the models."""
    steps = 40 if quick else 500
    yield Case("MLP, width 256", lambda: mlp(256), classified((32,)), steps)
    yield Case("MLP, width 1024", lambda: mlp(1024), classified((32,)), max(40, steps // 5))
    yield Case("CNN with BatchNorm", cnn, classified((3, 8, 8)), steps)
    yield Case("char-GPT", Language, language, steps)


def scales(case: Case, seed: int, clip_norm: float | None) -> tuple[list[float], int]:
    """Returns the scale of every step, as a power of two, and how many steps were skipped."""
    torch.manual_seed(seed)
    model, generator = case.model(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scaler, found, skipped = LossScaler(model), [], 0
    for _ in range(case.steps):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = case.loss(model, generator)
        scaler.backward(loss)
        result = scaler.step(optimizer, clip_norm=clip_norm)
        optimizer.zero_grad()
        found.append(math.log2(result.next_scale.item()))
        skipped += result.skipped()
    return found, skipped


def rows(quick: bool) -> list[Row]:
    """Returns two rows for each model: how close the scales are, and the steps skipped."""
    return [row for case in cases(quick) for row in _compared(case, seeds=1 if quick else 2)]


def _compared(case: Case, seeds: int) -> list[Row]:
    apart, skips, plain_skips = [], 0, 0
    for seed in range(seeds):
        plain, plain_skipped = scales(case, seed, None)
        clipped, clipped_skipped = scales(case, seed, NEVER_CLIPS)
        apart += [abs(one - other) for one, other in zip(plain, clipped, strict=True)]
        skips, plain_skips = skips + clipped_skipped, plain_skips + plain_skipped
    close = sum(bits <= CLOSE for bits in apart) / len(apart)
    what = f"auto with clip_norm: {case.name}"
    return [
        Row(f"{what}, steps within 1 bit", "without clipping", close, 1.0, unit="share of steps", at_least=True),
        Row(f"{what}, largest distance", "without clipping", max(apart), CLOSE, unit="bits"),
        Row(f"{what}, steps skipped", "without clipping", skips, plain_skips, unit="steps"),
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Scales of auto with and without clipping")
    parser.add_argument("--quick", action="store_true", help=QUICK)
    print_table(rows(parser.parse_args().quick), "Scales with and without clipping")


if __name__ == "__main__":
    main()
