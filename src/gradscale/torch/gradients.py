"""The gradients of one or more optimizers: the tensors to read and multiply, and the names of their parameters."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import mul
from typing import cast

import torch
from torch import Tensor, nn

from gradscale.torch.wrappers import own_module, own_name

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of optimizers, each of them once, whatever number of parameters and optimizers hold it.

    Attributes:
        parameters: the first parameter that holds each, as a list beside the others: an object for each gradient would
            cost more than its arithmetic.
        grads: the gradients themselves.
        values: the dense tensors that hold the numbers: the gradients themselves, the values of a sparse one, and the
            local shard of a distributed one.
        optimizers: those that hold the parameters.
        shared: whether one of the gradients is held more than once.
    """

    parameters: Sequence[Tensor]
    grads: Sequence[Tensor]
    values: Sequence[Tensor]
    optimizers: Sequence[Optimizer]
    shared: bool = False

    def __len__(self) -> int:
        return len(self.parameters)

    def owned_by(self, optimizers: Iterable[Optimizer]) -> "Gradients":
        """Returns those that parameters of `optimizers` hold."""
        owned = {id(parameter.grad) for parameter in parameters_of(optimizers)}
        return self.at([index for index, grad in enumerate(self.grads) if id(grad) in owned])

    def at(self, positions: Sequence[int]) -> "Gradients":
        """Returns those at `positions`."""
        parameters, grads = ([column[index] for index in positions] for column in (self.parameters, self.grads))
        values = grads if self.values is self.grads else [self.values[index] for index in positions]
        return Gradients(parameters, grads, values, self.optimizers, self.shared)

    @property
    def sharing(self) -> Sequence[Optimizer]:
        """The optimizers that hold a gradient which they or another hold once more."""
        if not self.shared:
            return ()
        held = Counter(id(each.grad) for each in parameters_of(self.optimizers) if each.grad is not None)
        return [
            optimizer
            for optimizer in self.optimizers
            if any(held[id(parameter.grad)] > 1 for parameter in parameters_of([optimizer]))
        ]


def collect(optimizers: Sequence[Optimizer], *, coalesce: bool = True) -> Gradients:
    """Returns every gradient the optimizers hold.

    Sparse gradients are coalesced in place; only FP16 ones without `coalesce`, as by torch's scaler: their sums may
    overflow.
    """
    # At every step: a cached list saves 6 us in 88 per 1,000 parameters, and misses groups that are added or replaced.
    parameters = [parameter for parameter in parameters_of(optimizers) if parameter.grad is not None]
    grads: list[Tensor] = [parameter.grad for parameter in parameters]  # type: ignore[misc]
    values = grads
    # Sparse tensors and DTensors hold their numbers in other tensors. By exact type: a subclass may be one of them.
    if not (set(map(type, grads)) <= {Tensor} and {grad.layout for grad in grads} <= {torch.strided}):
        # Read again: coalescing replaces the gradient, and a parameter may be listed twice. Without autograd, which
        # would make a node for each local shard.
        wide = {id(parameter) for parameter in parameters_of(filter(keeps_masters, optimizers))}
        with torch.no_grad():
            values = [
                # Masters cast it and divide that: it is not written to, and no sum is rounded to 16 bits.
                numbers_of(grad.float())
                if id(each) in wide and grad.is_sparse and grad.dtype.itemsize == 2
                else values_of(each, grad, coalesce=coalesce)
                for each, grad in ((each, cast(Tensor, each.grad)) for each in parameters)
            ]
        grads = [parameter.grad for parameter in parameters]  # type: ignore[misc]
    # A parameter may be listed twice, or belong to two optimizers, and two parameters may hold one `.grad`. Divided
    # for each of them, such a gradient would be too small by a factor of the scale.
    if len(set(map(id, grads))) == len(grads):
        return Gradients(parameters, grads, values, optimizers)
    first = {id(grad): index for index, grad in reversed(list(enumerate(grads)))}
    return Gradients(parameters, grads, values, optimizers, shared=True).at(sorted(first.values()))


def count_elements(values: Sequence[Tensor], weights: Sequence[float] | None = None) -> float:
    """Returns how many elements tensors have, those of each times its weight, by default 1."""
    sizes = map(Tensor.numel, values)
    return float(sum(sizes if weights is None else map(mul, sizes, weights)))


def parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Returns every parameter of the optimizers."""
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]


def parameters_below(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Returns every parameter of the modules and of those inside them; one that several hold more than once."""
    # A seventh of the cost of `Module.parameters`, which makes a name for each, at every step.
    pending: list[nn.Module | None] = list(modules)
    for module in pending:  # which grows meanwhile
        pending += () if module is None else module._modules.values()
    found = [each for module in pending if module is not None for each in module._parameters.values()]
    return [each for each in found if each is not None]


def keeps_masters(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer divides and applies the gradients of 16-bit parameters in float32."""
    # By its type: a wrapper that forwards attributes has the flag too, and does not take a divisor.
    return getattr(type(optimizer), "keeps_masters", False)


def values_of(parameter: Tensor, grad: Tensor, *, coalesce: bool = True) -> Tensor:
    """Returns the dense tensor that holds the numbers of `parameter.grad` here.

    A sparse gradient is coalesced in place, unless only FP16 ones are to be; one that ranks hold in summands is summed,
    placed as its parameter.
    """
    if grad.layout is torch.strided:
        if _is_partial(grad):
            # Each rank has a summand, as sequence parallel leaves them: no size and no bound is right before the sum.
            # One that each rank has as a whole stays so: an inf in a part that is another rank's must be found.
            grad = parameter.grad = grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        # The local shard shares its memory with the DTensor, so what is written to it reaches the gradient. Lists that
        # mix DTensors and plain tensors are rejected by torch's multi-tensor kernels.
        return local(grad)
    if grad.layout is not torch.sparse_coo:
        return grad.values()
    if not grad.is_coalesced() and (coalesce or grad.dtype is torch.float16):
        # Duplicate entries would be checked one by one, and their sum could overflow unseen.
        grad = parameter.grad = grad.coalesce()
    return grad._values()


def local(tensor: Tensor) -> Tensor:
    """Returns the shard or replica of a DTensor that this rank holds, in the same memory; any other tensor itself."""
    # By the method, not the class: importing `torch.distributed.tensor` takes a second.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined]


def _is_partial(grad: Tensor) -> bool:
    """Returns whether ranks hold summands of a gradient."""
    return any(placement.is_partial() for placement in getattr(grad, "placements", ()))


def numbers_of(grad: Tensor) -> Tensor:
    """Returns a dense tensor with the numbers of a gradient held here, to be read only.

    Those of a sparse one are coalesced.
    """
    # Entries of one row may be finite and their sum not.
    return grad.coalesce()._values() if grad.is_sparse else local(grad)


class Names:
    """Names of parameters: from their module, else from their optimizer, else by their position in it.

    As in the user's own model, without what `torch.compile`, DDP and other wrappers add. Looked up at every call, which
    is rare, so that replaced parameters are found too.

    Attributes:
        modules: those that give the names.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules

    def parameters(self) -> Iterator[Tensor]:
        """Yields the parameters of the modules."""
        for module in self.modules:
            yield from module.parameters()

    def of(self, parameters: Iterable[Tensor | None], optimizers: Iterable[Optimizer]) -> list[str]:
        """Returns the names of parameters of `optimizers`; with several modules, the module's index comes first.

        None stands for a parameter that no longer exists.
        """
        several = len(self.modules) > 1
        known = {id(parameter): place for parameter, place in _placed(optimizers)} | {
            id(parameter): f"{index}.{own_name(name)}" if several else own_name(name)
            for index, module in enumerate(map(own_module, self.modules))
            for name, parameter in module.named_parameters()
        }
        return [known.get(id(parameter), "(a parameter that is gone)") for parameter in parameters]


def _placed(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Tensor, str]]:
    """Yields every parameter of the optimizers with the name it has there, or with its group and index."""
    for optimizer in optimizers:
        for group_index, group in enumerate(optimizer.param_groups):
            names = group.get("param_names")
            for index, parameter in enumerate(group["params"]):
                yield parameter, own_name(names[index]) if names else f"param_groups[{group_index}].params[{index}]"
