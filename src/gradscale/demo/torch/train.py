"""One training step: how `gradscale.torch` is used."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradscale.demo.digits import load_digits
from gradscale.demo.run import Array, Gradients, Step
from gradscale.demo.text import load_text
from gradscale.demo.torch.cnn import DigitsTask
from gradscale.demo.torch.language import LanguageTask
from gradscale.demo.torch.task import Task
from gradscale.demo.train import Recipe, Trainer
from gradscale.demo.workers import Workers
from gradscale.formats import FP8_E4M3, FP8_E5M2, FP16, FP32, Format
from gradscale.torch import LossScaler, emulate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

TASKS: dict[str, Callable[[int], Task]] = {
    DigitsTask.subject.model: lambda seed: DigitsTask(load_digits(seed), DEVICE),
    LanguageTask.subject.model: lambda _: LanguageTask(load_text(), DEVICE),
}
"""Loads a task by a seed."""

Context = Callable[[], AbstractContextManager[Any]]

CONTEXTS: dict[Format, Context] = {
    FP32: nullcontext,
    FP16: lambda: torch.autocast(DEVICE.type, dtype=torch.float16),
    # As in FP8 training: E4M3 values that saturate, E5M2 gradients that overflow.
    FP8_E5M2: lambda: emulate(FP8_E4M3, FP8_E5M2, saturate=True),
}
"""The context of the forward pass. Parameters are always float32."""


@dataclass(frozen=True)
class TorchTrainer:
    """Trains the model of a task.

    Attributes:
        context: the context of the forward pass.
        generator: draws the batches.
        loss: which of the task's losses a step reports.
    """

    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    context: Context
    generator: torch.Generator
    loss: Literal["shown", "trained"] = "shown"

    def step(self, sample: bool) -> Step:
        batch = self.task.batch(self.generator)
        with self.context():
            losses = self.task.losses(self.model, batch)
        self.scaler.backward(losses.trained)
        grads = self._gradients(batch) if sample else None
        result = self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()
        return Step(float(getattr(losses, self.loss).detach()), float(result.scale), result.skipped(), grads)

    def scores(self) -> dict[str, float]:
        return self.task.scores(self.model)

    def _gradients(self, batch: Any) -> Gradients:
        parameters = list(self.model.parameters())
        with _activation_grads(self.model) as activations:
            reference = torch.autograd.grad(self.task.losses(self.model, batch).trained, parameters)
        kept = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return Gradients(_arrays(kept), _arrays(reference), _arrays(activations))


def load(model: str, seed: int) -> Callable[[Recipe], Trainer]:
    """Returns a function that makes a trainer for the model of this name."""
    return partial(_make, TASKS[model](seed), seed)


def _make(task: Task, seed: int, recipe: Recipe) -> TorchTrainer:
    model = initial_model(task, seed)
    scaler, generator = LossScaler(model, recipe.policy), torch.Generator().manual_seed(seed)
    return TorchTrainer(task, model, adam(task, model), scaler, CONTEXTS[recipe.format], generator)


def initial_model(task: Task, seed: int) -> nn.Module:
    """Returns the initial model of a seed. Must be called in one thread: threads share torch's random numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return task.model()


def adam(task: Task, model: nn.Module, eps: float = 1e-8) -> torch.optim.Optimizer:
    """Returns the optimizer of a task's model."""
    return torch.optim.Adam(model.parameters(), lr=task.learning_rate, eps=eps, fused=True)


@contextmanager
def workers() -> Iterator[Workers]:
    """Yields as many threads as torch would use for one operation, each with one core; a single one on accelerators."""
    # FP16 operations on a CPU are slow, and small here: splitting one between two cores gains nothing, and is much
    # slower on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Workers(threads if DEVICE.type == "cpu" else 1) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _arrays(tensors: Any) -> list[Array]:
    return [tensor.cpu().numpy() for tensor in tensors]


@contextmanager
def _activation_grads(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yields a list that fills with the gradients of the inputs and outputs of the layers that FP16 computes."""
    grads: list[Tensor] = []

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        del module
        for activation in (*inputs, output):
            if activation.requires_grad:
                activation.register_hook(grads.append)

    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    handles = [layer.register_forward_hook(watch) for layer in layers]
    yield grads
    for handle in handles:
        handle.remove()
