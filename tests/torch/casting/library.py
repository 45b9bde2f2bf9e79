"""Stands for a library that knows nothing of precision."""

from typing import Any

import torch
from torch import Tensor, nn


def types_of(*args: Any, **kwargs: Any) -> list[torch.dtype]:
    """Returns the types of the tensors it was given, at any depth."""
    from torch.utils._pytree import tree_leaves

    return [leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def fail(x: Tensor) -> Tensor:
    raise KeyError("on purpose")


def append_to(x: Tensor, found: list[str]) -> None:
    found.append("seen")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype
        return self.linear(x)

    @staticmethod
    def types_of(x: Tensor) -> list[torch.dtype]:
        return [x.dtype]

    @classmethod
    def make(cls) -> "Layer":
        return cls()
