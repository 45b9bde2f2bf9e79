"""Optimizers that people use, each with a small model that it can train."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Case:
    """An optimizer.

    Attributes:
        name: as it is imported, below its package.
        package: name of the distribution on PyPI.
        make: makes it for a model.
        module: the module that it is imported from.
        model: makes the model, with inputs of 4 rows in `rows`.
        closure: whether it evaluates the loss itself.
    """

    name: str
    package: str
    make: Callable[[Callable[..., Any], nn.Module], Any]
    module: str = ""
    model: Callable[[], nn.Module] = lambda: Layers()
    closure: bool = False

    def optimizer(self, model: nn.Module) -> Any:
        """Returns the optimizer of a model, imported only now."""
        module = import_module(self.module or self.package)
        return self.make(getattr(module, self.name), model)


class Layers(nn.Module):
    """Two matrices of 64 x 64, the smallest that optimizers with states of 8 bits quantize, and biases by default."""

    def __init__(self, *, bias: bool = True, sparse: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=bias) if not sparse else nn.EmbeddingBag(64, 64, mode="sum", sparse=True)
        self.second = None if sparse else nn.Linear(64, 64, bias=bias)

    def forward(self, rows: Tensor) -> Tensor:
        if self.second is None:
            return self.first(rows.argsort(dim=1)[:, :8])
        return self.second(self.first(rows).tanh())


def usual(**settings: Any) -> Callable[[Callable[..., Any], nn.Module], Any]:
    """Returns a function that makes an optimizer of all parameters."""
    return lambda kind, model: kind(model.parameters(), **settings)


def training_mode(kind: Callable[..., Any], model: nn.Module) -> Any:
    """Returns a schedule-free optimizer, which must be told that training begins."""
    optimizer = kind(model.parameters(), lr=1e-2)
    optimizer.train()
    return optimizer


def low_rank(kind: Callable[..., Any], model: nn.Module) -> Any:
    """Returns GaLore's, which projects the gradients of matrices, and chooses the projection anew every other step."""
    matrices, others = ([each for each in model.parameters() if (each.ndim == 2) is wanted] for wanted in (True, False))
    projected = {"params": matrices, "rank": 8, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
    return kind([projected, {"params": others}], lr=1e-2, no_deprecation_warning=True)


TORCH = (
    Case("Muon", "torch", usual(lr=1e-2), "torch.optim", lambda: Layers(bias=False)),
    Case("Adafactor", "torch", usual(lr=1e-2), "torch.optim"),
    Case("SparseAdam", "torch", usual(lr=1e-2), "torch.optim", lambda: Layers(sparse=True)),
    Case("LBFGS", "torch", usual(lr=0.1, max_iter=2), "torch.optim", closure=True),
)
"""Those of torch that differ most from SGD and Adam, which all other tests train with."""

OTHERS = (
    Case("Adam8bit", "bitsandbytes", usual(lr=1e-2), "bitsandbytes.optim"),
    Case("AdamW8bit", "bitsandbytes", usual(lr=1e-2), "bitsandbytes.optim"),
    Case("Lion8bit", "bitsandbytes", usual(lr=1e-2), "bitsandbytes.optim"),
    Case("AdamW8bit", "torchao", usual(lr=1e-2), "torchao.optim"),
    Case("AdamWScheduleFree", "schedulefree", training_mode),
    Case("Prodigy", "prodigyopt", usual()),
    Case("Lion", "lion-pytorch", usual(lr=1e-3), "lion_pytorch"),
    Case("CAME", "came-pytorch", usual(lr=1e-2), "came_pytorch"),
    Case("Adam_mini", "adam-mini", lambda kind, m: kind(m.named_parameters(), lr=1e-2, verbose=False), "adam_mini"),
    Case("GaLoreAdamW", "galore-torch", low_rank, "galore_torch"),
    Case("SOAP", "pytorch-optimizer", usual(lr=1e-2, precondition_frequency=2), "pytorch_optimizer"),
    Case("Shampoo", "pytorch-optimizer", usual(lr=1e-2), "pytorch_optimizer"),
    Case("ScalableShampoo", "pytorch-optimizer", usual(lr=1e-2), "pytorch_optimizer"),
    Case("Kron", "kron-torch", usual(lr=1e-3), "kron_torch"),
)
"""Those of packages of their own, which are in an environment of their own."""
