"""The gradients of one or more optimizers: which tensors to read and multiply, and what to call them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gradient:
    """One parameter's gradient.

    Attributes:
        name: the parameter's name in the model, or its place in the optimizer.
        parameter: who owns the gradient.
        values: the dense tensor that holds the numbers: `.grad` itself, or the values of a sparse one.
    """

    name: str
    parameter: Tensor
    values: Tensor


def collect(optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]) -> list[Gradient]:
    """Returns every gradient the optimizers hold, each parameter once. Sparse gradients are coalesced in place."""
    seen: set[int] = set()
    found: list[Gradient] = []
    for name, parameter in named_parameters(optimizers, names):
        if parameter.grad is None or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        found.append(Gradient(name, parameter, _values(parameter, parameter.grad)))
    return found


def named_parameters(
    optimizers: Iterable[torch.optim.Optimizer], names: dict[int, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter of the optimizers with the best name known for it."""
    for optimizer in optimizers:
        for group_index, group in enumerate(optimizer.param_groups):
            own_names = group.get("param_names")
            for index, parameter in enumerate(group["params"]):
                place = own_names[index] if own_names else f"param_groups[{group_index}].params[{index}]"
                yield names.get(id(parameter), place), parameter


def _values(parameter: Tensor, grad: Tensor) -> Tensor:
    if not grad.is_sparse:
        return grad
    if not grad.is_coalesced():
        # Duplicate entries would be checked one by one, and their sum could overflow unseen.
        grad = parameter.grad = grad.coalesce()
    return grad._values()
