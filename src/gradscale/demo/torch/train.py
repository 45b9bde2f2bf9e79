"""The training loop: one way to train a model, and what became of it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.demo.run import SAMPLE_EVERY, Run
from gradscale.demo.torch.task import Task
from gradscale.formats import FP8_E4M3, FP8_E5M2
from gradscale.histogram import exponent_histogram
from gradscale.torch import LossScaler, emulate


@dataclass(frozen=True)
class Way:
    """A way to train. Parameters are always float32.

    Attributes:
        name: what the table and the plot call it.
        policy: the rule for the scale, or `"auto"`.
        block: makes what the model runs in, for a kind of device.
    """

    name: str
    policy: Any
    block: Callable[[str], AbstractContextManager[Any]]


def in_fp32(device: str) -> AbstractContextManager[Any]:
    """Returns a block that changes nothing."""
    del device
    return nullcontext()


def in_fp16(device: str) -> AbstractContextManager[Any]:
    """Returns a block of real FP16."""
    return torch.autocast(device, dtype=torch.float16)


def in_fp8(device: str) -> AbstractContextManager[Any]:
    """Returns a block of emulated FP8, as it is trained in: E4M3 values that saturate, E5M2 gradients that overflow."""
    del device
    return emulate(FP8_E4M3, FP8_E5M2, saturate=True)


def train(way: Way, task: Task, model: nn.Module, seed: int, steps: int, tick: Callable[[], None]) -> Run:
    """Returns the run. The same seed gives every way the same batches.

    Args:
        way: how to train.
        task: what to train.
        model: where to start from; it is changed.
        seed: of the batches.
        steps: how many.
        tick: called after each.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=task.learning_rate, fused=True)
    scaler = LossScaler(model, way.policy)
    run = Run(way.name)
    device = next(model.parameters()).device.type
    for step in range(steps):
        batch = task.batch(generator)
        with way.block(device):
            losses = task.losses(model, batch)
        scaler.backward(losses.trained)
        if step % SAMPLE_EVERY == 0:
            _sample(run, step, task, model, batch)
        result = scaler.step(optimizer)
        optimizer.zero_grad()
        if result.skipped():
            run.skipped.append(step)
        run.losses.append(float(losses.shown.detach()))
        run.scales.append(float(result.scale))
        tick()
    run.scores = task.scores(model)
    return run


def _sample(run: Run, step: int, task: Task, model: nn.Module, batch: Any) -> None:
    """Compares the gradients with those that FP32 makes of the same weights and batch."""
    parameters = list(model.parameters())
    with _activation_grads(model) as activation_grads:
        true_grads = torch.autograd.grad(task.losses(model, batch).trained, parameters)
    kept_grads = [parameter.grad for parameter in parameters]
    nonzero = sum(int(true.count_nonzero()) for true in true_grads)
    lost = sum(int(((true != 0) & (kept == 0)).sum()) for true, kept in zip(true_grads, kept_grads, strict=True))
    run.sampled.append(step)
    run.lost.append(lost / max(1, nonzero))
    run.histogram = run.histogram + exponent_histogram(grad.cpu().numpy() for grad in (*true_grads, *activation_grads))


@contextmanager
def _activation_grads(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yields a list that fills with the gradients of what goes into and comes out of the layers that FP16 computes."""
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
