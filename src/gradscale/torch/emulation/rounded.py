"""Rounds values in the graph: now, and their gradients when those come back.

The graph is told nothing of it: the gradient of rounding is taken to be 1, as if it were a cast. A function that keeps
its result for the backward pass has kept the rounded one, as it would in FP16. Gradients of gradients are rounded too.
"""

from functools import partial

import torch
from torch import Tensor

from gradscale.torch.emulation.rounding import Rounding

ONE = torch.tensor(1.0, device="cpu")


def round_result(tensor: Tensor, values: Rounding, grads: Rounding) -> Tensor:
    """Rounds a function's new result in place, and returns it.

    Args:
        tensor: the result. Nobody else may have it.
        values: rounds it.
        grads: rounds its gradient.
    """
    values.round_(tensor.data)
    return round_grads(tensor, grads)


def rounded(tensor: Tensor, values: Rounding, grads: Rounding) -> Tensor:
    """Returns a tensor rounded, and leaves it alone.

    The copy is a product with 1, for which torch keeps a tensor. So a checkpoint that is computed again without
    emulation keeps fewer than it did at first, which torch notices. It would silently be float32 otherwise.

    Args:
        tensor: the original.
        values: rounds it.
        grads: rounds its gradient.
    """
    return round_result(tensor * ONE, values, grads)


def round_grads(tensor: Tensor, grads: Rounding) -> Tensor:
    """Has the gradient that comes back to a tensor rounded, and returns the tensor."""
    if tensor.requires_grad:
        tensor.register_hook(partial(rounded, values=grads, grads=grads))
    return tensor
