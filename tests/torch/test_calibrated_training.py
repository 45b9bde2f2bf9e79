"""The scale that `calibrate` recommends trains like float32, and what it predicts of other scales happens."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradscale import FP16, NoScaling, Static
from gradscale.histogram import Calibration
from gradscale.torch import LossScaler, calibrate, emulate

pytestmark = [pytest.mark.slow, pytest.mark.not_simulated("counts of exponents: the device has no `bincount`")]

CALIBRATED, STEPS, LAST = 50, 300, 20
AWAY = 2.0**6


@dataclass(frozen=True)
class Case:
    """A model, its batches, the loss that is trained and the loss that is compared."""

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    losses: Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
    learning_rate: float


def mlp() -> Case:
    from gradscale.demo.digits import load_digits

    digits = load_digits(0)
    images, labels = torch.as_tensor(digits.images), torch.as_tensor(digits.labels)
    images = (images - images.mean()) / images.std()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(images), (32,), generator=generator)
        return images[chosen], labels[chosen]

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        loss = nn.functional.cross_entropy(model(batch[0]).float(), batch[1])
        return loss, loss

    return Case(make, batch, losses, 3e-3)


def of_the_demo(name: str) -> Case:
    from gradscale.demo.torch.train import TASKS

    task = TASKS[name](0)
    return Case(task.model, task.batch, lambda model, batch: task.losses(model, batch), task.learning_rate)


CASES = {"mlp": mlp, "cnn": lambda: of_the_demo("cnn"), "gpt": lambda: of_the_demo("gpt")}


def start(case: Case, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.Generator]:
    torch.manual_seed(seed)
    model = case.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=case.learning_rate)
    return model, optimizer, torch.Generator().manual_seed(seed)


def calibrated(case: Case) -> Calibration:
    model, optimizer, generator = start(case, 0)
    batches = [case.batch(generator) for _ in range(CALIBRATED)]
    return calibrate(model, batches, lambda model, batch: case.losses(model, batch)[0], optimizer=optimizer)


def train(case: Case, scale: float | None = None, seed: int = 0) -> tuple[float, int]:
    """Returns the loss at the end and the number of skipped steps; in emulated FP16 where there is a scale."""
    model, optimizer, generator = start(case, seed)
    scaler = LossScaler(model, NoScaling() if scale is None else Static(scale), on_stuck="ignore")
    found: list[float] = []
    for _ in range(STEPS):
        with nullcontext() if scale is None else emulate(FP16):
            trained, compared = case.losses(model, case.batch(generator))
        scaler.backward(trained)
        scaler.step(optimizer)
        optimizer.zero_grad()
        found.append(compared.item())
    return float(np.mean(found[-LAST:])), 0 if scale is None else int(scaler.metrics()["skipped"])


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CASES)
def test_the_recommended_scale_trains_like_float32_and_skips_nothing(name: str) -> None:
    pytest.importorskip("sklearn")
    case = CASES[name]()
    seeds = [train(case, seed=seed)[0] for seed in (0, 1, 2)]
    loss, skipped = train(case, calibrated(case).scale)
    assert skipped == 0
    # Three seeds show part of the noise: as far again to either side.
    assert loss < max(seeds) + (max(seeds) - min(seeds))


@pytest.mark.parametrize("name", CASES)
def test_a_scale_far_above_overflows_as_predicted(name: str) -> None:
    pytest.importorskip("sklearn")
    case = CASES[name]()
    found = calibrated(case)
    predicted = next(each.losses.overflow for each in found.at if each.scale == found.scale * AWAY)
    assert predicted > 0
    assert train(case, found.scale * AWAY)[1] > 0.5 * STEPS


def test_a_scale_far_below_flushes_gradients_of_the_gpt_and_harms_it() -> None:
    case = of_the_demo("gpt")
    found = calibrated(case)
    below = next(each.losses.flushed for each in found.at if each.scale == found.scale / AWAY)
    assert below > 10 * found.losses.flushed
    (loss, _), (harmed, skipped) = train(case, found.scale), train(case, found.scale / AWAY)
    assert skipped == 0
    assert harmed > loss + 0.02


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_scale_far_below_is_predicted_to_flush_little_of_the_others(name: str) -> None:
    pytest.importorskip("sklearn")
    found = calibrated(CASES[name]())
    below = next(each.losses.flushed for each in found.at if each.scale == found.scale / AWAY)
    assert found.losses.flushed <= below < 0.01
