"""What `gradscale replay` predicts for other policies, against running them: five small trainings in FP16 on a CPU.

Each is recorded with `Headroom`, and its record replayed with other policies. Then it is trained with each of these,
from the same weights and batches. The weights of a run with other skips, and other rounding, are others: this is the
error of a replay.

Command: python -m benchmarks.predictions
"""

import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples.char_gpt import batches, char_gpt, loss_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from gradscale import Dynamic, Headroom, Policy, Static
from gradscale.recording.reader import Run, read_run
from gradscale.report.what_if import predict
from gradscale.torch import LossScaler

STEPS = 400
POLICIES = {
    "Dynamic(growth_interval=50)": Dynamic(growth_interval=50),
    "Dynamic(init_scale=2**24)": Dynamic(init_scale=2.0**24),
    "Static(2**16)": Static(2.0**16),
}

HEADING = """| training | policy | skipped: predicted | run | undecided | bits between the scales |
|---|---|---|---|---|---|"""

Loss = Callable[[nn.Module, Any], Tensor]


def digits(rows: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(0)
    while True:
        chosen = torch.randint(len(pixels), (rows,), generator=generator).numpy()
        yield torch.tensor(pixels[chosen] / 16, dtype=torch.float32), torch.tensor(labels[chosen])


def text(model: nn.Module, rows: Tensor) -> Tensor:
    return loss_of(model(rows[:, :-1]), rows)


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]).float(), batch[1])


def redrawn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return 1e-4 * mse_loss(model(batch[0]).float(), batch[0])


def mlp(*sizes: int) -> nn.Module:
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.GELU())]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    convolutions = [layer for pair in ((1, 16), (16, 32)) for layer in (nn.Conv2d(*pair, 3, padding=1), nn.ReLU())]
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *convolutions, nn.Flatten(), nn.Linear(2048, 10))


TRAININGS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Loss, float]] = {
    "char-GPT": (char_gpt, lambda: iter(batches(STEPS, 0)), text, 3e-3),
    "char-GPT, learning rate 0.02": (char_gpt, lambda: iter(batches(STEPS, 1)), text, 2e-2),
    "MLP": (lambda: mlp(64, 128, 128, 10), digits, classified, 3e-3),
    "CNN": (cnn, digits, classified, 3e-3),
    "autoencoder, loss times 1e-4": (lambda: mlp(64, 128, 16, 128, 64), digits, redrawn, 3e-3),
}


def trained(name: str, policy: Policy, folder: Path) -> Run:
    """Trains with a policy, and returns what was recorded."""
    make, data, loss_in, lr = TRAININGS[name]
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    scaler = LossScaler(model, policy=policy, record=path, on_stuck="ignore")
    for _, batch in zip(range(STEPS), data(), strict=False):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_in(model, batch)
        scaler.backward(loss)
        scaler.step(optimizer, clip_norm=1.0)
        optimizer.zero_grad()
    scaler._memory.recorder.close()
    return read_run(path)


def main() -> None:
    """Prints a row for each training and policy."""
    torch.set_num_threads(1)
    print(HEADING)
    with tempfile.TemporaryDirectory() as folder:
        for name in TRAININGS:
            recorded = trained(name, Headroom(), Path(folder))
            for found, (title, policy) in zip(
                predict(recorded, list(POLICIES.values())), POLICIES.items(), strict=True
            ):
                real = trained(name, policy, Path(folder))
                apart = np.abs(np.log2(found.scales) - np.log2(real.scale)).mean()
                cells = (int(found.skipped.sum()), int(real.skipped.sum()), int(found.undecided.sum()), f"{apart:.2f}")
                print(f"| {name} | `{title}` | {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
