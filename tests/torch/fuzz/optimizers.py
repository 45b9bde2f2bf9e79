"""Optimizers by name: torch's own in each implementation, and one that is not torch's."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from tests.torch.fuzz.setup import OptimizerSetup
from torch import Tensor

from gradscale.torch import MasterWeights

_sgd, _adam, _adamw = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


class Decay(torch.optim.Optimizer):
    """An optimizer of a user's own: SGD whose rate is halved at every step of a group. It takes no closure."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * 0.5 ** group["steps"])


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(_sgd, lr=0.125, foreach=False),
    "sgd foreach": partial(_sgd, lr=0.125, foreach=True),
    "sgd fused": partial(_sgd, lr=0.125, fused=True),
    "sgd momentum": partial(_sgd, lr=0.125, momentum=0.5, foreach=False),
    "sgd momentum foreach": partial(_sgd, lr=0.125, momentum=0.5, nesterov=True, foreach=True),
    "sgd momentum fused": partial(_sgd, lr=0.125, momentum=0.5, weight_decay=0.25, fused=True),
    "sgd dampening": partial(_sgd, lr=0.125, momentum=0.5, dampening=0.25, weight_decay=0.5, foreach=False),
    "sgd dampening fused": partial(_sgd, lr=0.125, momentum=0.5, dampening=0.25, fused=True),
    "sgd maximize fused": partial(_sgd, lr=0.125, momentum=0.5, nesterov=True, maximize=True, fused=True),
    "adam": partial(_adam, lr=0.01, foreach=False),
    "adam foreach": partial(_adam, lr=0.01, amsgrad=True, foreach=True),
    "adam fused": partial(_adam, lr=0.01, amsgrad=True, fused=True),
    "adamw": partial(_adamw, lr=0.01, foreach=False),
    "adamw foreach": partial(_adamw, lr=0.01, foreach=True),
    "adamw fused": partial(_adamw, lr=0.01, maximize=True, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, foreach=False),
    "adagrad foreach": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.5, foreach=True),
    "adagrad fused": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.25, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True, foreach=False),
    "rmsprop foreach": partial(torch.optim.RMSprop, lr=0.01, foreach=True),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "sparse adam": partial(torch.optim.SparseAdam, lr=0.01),
    "user's own": partial(Decay, lr=0.125),
    "lbfgs": partial(torch.optim.LBFGS, lr=0.125, max_iter=2),
}

FOR_SPARSE = ("sgd", "sgd momentum", "adagrad", "sparse adam", "user's own")
FOR_COMPLEX = ("sgd", "sgd foreach", "sgd momentum", "adam", "adam foreach", "adamw foreach", "rmsprop", "user's own")
FOR_HALF = ("sgd", "sgd foreach", "sgd fused", "sgd momentum", "sgd momentum foreach", "sgd dampening", "user's own")
"""Optimizers for 16-bit parameters without masters. Adam's `eps` is 0 in FP16."""


def make_optimizer(setup: OptimizerSetup, find: Callable[[str], Tensor]) -> torch.optim.Optimizer:
    """Returns the optimizer of torch, with the tensors that `find` returns for its parameters."""
    first, *others = [[find(name) for name in group] for group in setup.groups]
    optimizer = OPTIMIZERS[setup.kind](first)
    for group in others:
        optimizer.add_param_group({"params": group})
    return optimizer


def with_masters(optimizer: torch.optim.Optimizer, setup: OptimizerSetup) -> torch.optim.Optimizer:
    """Returns the optimizer, inside `MasterWeights` if the setup says so."""
    if setup.storage is None:
        return optimizer
    seed = 7 if setup.storage == "stochastic" else None
    return MasterWeights(optimizer, setup.storage, grad_fp32=setup.grad_fp32, seed=seed)
