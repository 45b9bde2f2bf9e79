"""Trainings that `gradscale doctor` is given, most of them with a fault."""

import math
from collections.abc import Callable
from typing import Any

import torch
from tests.torch.probing.models import Attention, Block, Stack, rows
from torch import Tensor, nn

Made = tuple[nn.Module, list[Tensor], Callable[[nn.Module, Tensor], Tensor]]


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        output = model(x)
    return output.float().square().mean()


def healthy() -> Made:
    torch.manual_seed(0)
    return Stack(Block(), Block()), [rows(0), rows(1)], loss_fn


def nan_weight() -> Made:
    model, batches, loss = healthy()
    with torch.no_grad():
        next(model.parameters())[0, 0] = math.nan
    return model, batches, loss


def softmax_overflow() -> Made:
    torch.manual_seed(0)
    return Stack(Block(), Attention(gain=1e4)), [rows()], loss_fn


def steep_learning_rate() -> tuple[Any, ...]:
    made = healthy()
    return (*made, torch.optim.SGD(made[0].parameters(), lr=1e6))


def tiny_loss() -> Made:
    model, batches, loss = healthy()
    return model, batches, lambda model, x: loss(model, x) * 1e-9


def one_nan_batch() -> Made:
    model, _, loss = healthy()
    batches = [rows(seed) for seed in range(20)]
    batches[4][0, 0] = math.nan
    return model, batches, loss


def optimizer_of_another_model() -> tuple[Any, ...]:
    return (*healthy(), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1e-3))


def loss_that_is_a_number() -> tuple[Any, ...]:
    model, batches, loss = healthy()
    return model, batches, lambda model, x: loss(model, x).item()


def no_batches() -> Made:
    model, _, loss = healthy()
    return model, [], loss


def raises() -> Made:
    raise KeyError("in the user's function")


def a_model() -> nn.Module:
    return healthy()[0]
