"""The gradients of one or more optimizers: which tensors to read and multiply, and what to call them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

Optimizer = torch.optim.Optimizer


Place = str | tuple[int, int]
"""A parameter's name in its optimizer, or which of which parameter group it is: put into words when somebody asks."""


class Gradient(NamedTuple):
    """One parameter's gradient.

    Attributes:
        parameter: who owns the gradient.
        values: the dense tensor that holds the numbers: `.grad` itself, or the values of a sparse one.
        place: what to call the parameter where no module names it.
    """

    parameter: Tensor
    values: Tensor
    place: Place


def collect(optimizers: Sequence[Optimizer]) -> list[Gradient]:
    """Returns every gradient the optimizers hold, each parameter once. Sparse gradients are coalesced in place."""
    found = [
        Gradient(parameter, values_of(parameter, grad), place)
        for parameter, place in placed_parameters(optimizers)
        if (grad := parameter.grad) is not None
    ]
    return list({id(gradient.parameter): gradient for gradient in found}.values()) if len(optimizers) > 1 else found


def parameters_of(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Yields every parameter of the optimizers."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def placed_parameters(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Tensor, Place]]:
    """Yields every parameter of the optimizers with the name or the place it has there."""
    for optimizer in optimizers:
        for group_index, group in enumerate(optimizer.param_groups):
            names = group.get("param_names")
            for index, parameter in enumerate(group["params"]):
                yield parameter, names[index] if names else (group_index, index)


def share_parameters(optimizers: Sequence[Optimizer]) -> bool:
    """Returns whether a parameter belongs to more than one of the optimizers."""
    if len(optimizers) == 1:
        return False
    owned = [id(parameter) for parameter in parameters_of(optimizers)]
    return len(set(owned)) < len(owned)


class Names:
    """What parameters are called: as in their module, else by their place in the optimizer.

    Looked up when somebody asks, which is seldom, so that modules whose parameters were replaced are no trouble.

    Attributes:
        modules: those that give the names.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules

    def of(self, parameters: Iterable[tuple[Tensor | None, Place]]) -> list[str]:
        """Returns the names of parameters that come with their place; with several modules, they start with which."""
        several = len(self.modules) > 1
        known = {
            id(parameter): f"{index}.{name}" if several else name
            for index, module in enumerate(self.modules)
            for name, parameter in module.named_parameters()
        }
        return [known.get(id(parameter)) or _in_words(place) for parameter, place in parameters]


def _in_words(place: Place) -> str:
    return place if isinstance(place, str) else f"param_groups[{place[0]}].params[{place[1]}]"


def values_of(parameter: Tensor, grad: Tensor) -> Tensor:
    """Returns the dense tensor that holds the numbers of `parameter.grad`. A sparse one is coalesced in place.

    For a view of a conjugate that is what it is a view of: multi-tensor kernels refuse such views, and neither its size
    nor multiplying by a real number makes a difference between the two.
    """
    if grad.layout is torch.strided:
        return grad.conj() if grad.is_conj() else grad
    if grad.layout is not torch.sparse_coo:
        return grad.values()
    if not grad.is_coalesced():
        # Duplicate entries would be checked one by one, and their sum could overflow unseen.
        grad = parameter.grad = grad.coalesce()
    return grad._values()
