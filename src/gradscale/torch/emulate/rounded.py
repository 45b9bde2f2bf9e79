"""The step of the graph that rounds: values on the way forward, their gradient on the way back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Round = Callable[[Tensor], Tensor]


def rounded(values: Tensor, forward: Round, backward: Round) -> Tensor:
    """Returns `values` rounded by `forward`; the gradient that comes back is rounded by `backward`.

    The gradient of rounding itself is taken to be 1, as if it were a cast. Gradients of gradients are rounded too.
    """
    if torch.is_grad_enabled() and values.requires_grad:
        return _Rounded.apply(values, forward, backward)  # type: ignore[return-value]
    return forward(values)


def unchanged(values: Tensor) -> Tensor:
    """Returns the values as they are: what `forward` is for values that have been rounded already."""
    return values


class _Rounded(torch.autograd.Function):
    """Saves a tensor of no size. Recomputing a checkpoint without emulation saves none, which torch notices.

    Without it the recomputed pass would silently be float32.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, forward: Round, backward: Round) -> Tensor:
        del backward
        return forward(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Round, Round], output: Tensor) -> None:
        ctx.round = inputs[2]
        ctx.save_for_backward(output.new_empty(0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return rounded(grads[0], ctx.round, ctx.round), None, None
