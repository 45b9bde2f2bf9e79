"""The scale that `calibrate` recommends trains like float32, and what it predicts of other scales happens.

Training is emulated: values in FP16, and gradients in the format that was calibrated.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradscale import FP8_E4M3, FP16, Format, NoScaling, Static
from gradscale.histogram import Calibration, Losses
from gradscale.torch import LossScaler, calibrate, emulate
from gradscale.torch.cast import tensors_in

pytestmark = [pytest.mark.slow, pytest.mark.cpu_only("trainings of minutes")]

CALIBRATED, STEPS, LAST = 50, 300, 20
SEEDS = (0, 1, 2)
AWAY = 2.0**6

AGREEMENT = 0.2
"""How far the share of elements that are flushed in a run may be from the predicted one, as a part of that."""


@dataclass(frozen=True)
class Case:
    """A model, its batches, the loss that is trained and the loss that is compared."""

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    losses: Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
    learning_rate: float
    format: Format


class Encoder(nn.Module):
    """A transformer layer that reads a digit row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, 32)
        self.positions = nn.Parameter(torch.zeros(8, 32))
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.rows(x.view(-1, 8, 8)) + self.positions).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def of_digits(model: Callable[[], nn.Module]) -> Case:
    from examples.demo.data import load_digits

    digits = load_digits(0)
    images, labels = torch.as_tensor(digits.images), torch.as_tensor(digits.labels)
    images = (images - images.mean()) / images.std()

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(images), (32,), generator=generator)
        return images[chosen], labels[chosen]

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        loss = nn.functional.cross_entropy(model(batch[0]).float(), batch[1])
        return loss, loss

    return Case(model, batch, losses, 3e-3, FP8_E4M3)


def of_the_demo(name: str) -> Case:
    from examples.demo.with_torch import TASKS

    task = TASKS[name](0)
    return Case(task.model, task.batch, lambda model, batch: task.losses(model, batch), task.learning_rate, FP16)


MAKE: dict[str, Callable[[], Case]] = {
    "gpt, FP16": lambda: of_the_demo("gpt"),
    "encoder, FP8": lambda: of_digits(Encoder),
    "mlp, FP8": lambda: of_digits(mlp),
    "cnn, FP16": lambda: of_the_demo("cnn"),
}

HARMED = ["gpt, FP16", "encoder, FP8", "mlp, FP8"]
"""Those that are predicted to lose more than a tenth of their gradients at a scale 2**6 below the recommended one."""


@cache
def case_of(name: str) -> Case:
    pytest.importorskip("sklearn")
    return MAKE[name]()


def start(case: Case, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.Generator]:
    torch.manual_seed(seed)
    model = case.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=case.learning_rate)
    return model, optimizer, torch.Generator().manual_seed(seed)


@cache
def calibrated(name: str) -> Calibration:
    case = case_of(name)
    model, optimizer, generator = start(case, 0)
    batches = [case.batch(generator) for _ in range(CALIBRATED)]
    return calibrate(
        model, batches, lambda model, batch: case.losses(model, batch)[0], case.format, optimizer=optimizer
    )


def predicted(name: str, factor: float) -> Losses:
    """Returns what is predicted to be lost at the recommended scale times a factor."""
    found = calibrated(name)
    return next(each.losses for each in found.at if each.scale == found.scale * factor)


@cache
def train(name: str, factor: float | None, seed: int = 0) -> tuple[float, int]:
    """Returns the loss at the end and the skipped steps, at the recommended scale times a factor; None is float32."""
    case = case_of(name)
    model, optimizer, generator = start(case, seed)
    policy = NoScaling() if factor is None else Static(calibrated(name).scale * factor)
    scaler = LossScaler(model, policy, on_stuck="ignore")
    found: list[float] = []
    for _ in range(STEPS):
        with nullcontext() if factor is None else emulate(FP16, case.format):
            trained, compared = case.losses(model, case.batch(generator))
        scaler.backward(trained)
        scaler.step(optimizer)
        optimizer.zero_grad()
        found.append(compared.item())
    return float(np.mean(found[-LAST:])), 0 if factor is None else int(scaler.metrics()["skipped"])


def gradients(model: nn.Module, backward: Callable[[], None]) -> Tensor:
    """Returns all that calibration counts, as one vector: gradients of parameters and of the outputs of modules."""
    found: list[Tensor] = []

    def keep(position: int, grad: Tensor) -> None:
        found[position] = grad.detach().clone()

    def note(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(keep, len(found)))
                found.append(torch.zeros(0))

    handles = [module.register_forward_hook(note) for module in model.modules()]
    model.zero_grad()
    backward()
    for handle in handles:
        handle.remove()
    found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([each.flatten() for each in found])


def measured(name: str, factor: float) -> float:
    """Returns the share of nonzero gradients that were flushed in the first steps of a run.

    At each step the gradients of the same weights and the same batch are computed in float32 too.
    """
    case = case_of(name)
    model, optimizer, generator = start(case, 0)
    scaler = LossScaler(model, Static(calibrated(name).scale * factor))
    nonzero = flushed = 0
    for _ in range(CALIBRATED):
        batch = case.batch(generator)
        buffers = [buffer.clone() for buffer in model.buffers()]
        exact = gradients(model, lambda batch=batch: case.losses(model, batch)[0].backward())
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)

        def backward(batch: Any = batch) -> None:
            with emulate(FP16, case.format):
                loss = case.losses(model, batch)[0]
            scaler.backward(loss)

        low = gradients(model, backward)
        nonzero += int((exact != 0).sum())
        flushed += int(((exact != 0) & (low == 0)).sum())
        scaler.step(optimizer)
        optimizer.zero_grad()
    return flushed / nonzero


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", MAKE)
def test_the_recommended_scale_trains_like_float32_and_skips_nothing(name: str) -> None:
    seeds = [train(name, None, seed)[0] for seed in SEEDS]
    loss, skipped = train(name, 1.0)
    assert skipped == 0
    # Three seeds show part of the noise: as far again to either side.
    assert loss < max(seeds) + (max(seeds) - min(seeds))


@pytest.mark.parametrize("factor", [1.0, 1 / AWAY], ids=["recommended", "below"])
@pytest.mark.parametrize("name", MAKE)
def test_as_much_is_flushed_as_predicted(name: str, factor: float) -> None:
    expected = predicted(name, factor).flushed
    assert measured(name, factor) == pytest.approx(expected, rel=AGREEMENT)


@pytest.mark.parametrize("name", MAKE)
def test_a_scale_far_below_is_predicted_to_flush_many_times_as_much(name: str) -> None:
    assert predicted(name, 1 / AWAY).flushed > 15 * predicted(name, 1.0).flushed
    assert (predicted(name, 1 / AWAY).flushed > 0.1) == (name in HARMED)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", HARMED)
def test_a_scale_far_below_is_measurably_worse_where_much_is_flushed(name: str, seed: int) -> None:
    """By more than the format makes at the recommended scale, from the same start and on the same batches."""
    recommended, (below, skipped) = train(name, 1.0, seed)[0], train(name, 1 / AWAY, seed)
    assert skipped == 0
    difference = max(abs(train(name, 1.0, each)[0] - train(name, None, each)[0]) for each in SEEDS)
    assert below - recommended > difference


def test_a_scale_far_below_does_not_harm_where_little_is_flushed() -> None:
    name = "cnn, FP16"
    seeds = [train(name, None, seed)[0] for seed in SEEDS]
    assert predicted(name, 1 / AWAY).flushed < 0.01
    loss, skipped = train(name, 1 / AWAY)
    assert skipped == 0
    assert loss < max(seeds) + (max(seeds) - min(seeds))


@pytest.mark.parametrize("name", MAKE)
def test_a_scale_far_above_overflows_as_predicted(name: str) -> None:
    assert predicted(name, 1.0).overflow == 0
    assert predicted(name, AWAY).overflow > 0
    (loss, skipped), (recommended, _) = train(name, AWAY), train(name, 1.0)
    assert skipped > 0.9 * STEPS
    assert loss > 2 * recommended or loss > recommended + 1
