"""Graphs whose backward pass is run more than once: which allow it, and their memory afterwards."""

from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from gradscale.torch.accumulation.leaves import nodes_of


def is_repeatable(loss: Tensor) -> bool:
    """Returns whether the graph of `loss` has operations of torch's own only, whose backward pass may be run again.

    A function that is written in Python or in an extension may write to what it has saved, free it, or refuse: kernels
    that compute their gradient in the forward pass multiply it in place in the backward pass, and compiled models give
    their buffers away. Takes about 0.3 us for each node.
    """
    if loss.grad_fn is None:
        return False
    return not any(isinstance(node, BackwardCFunction) or "CppNode" in node.name() for node in nodes_of(loss.grad_fn))


def has_hidden_leaves(loss: Tensor) -> bool:
    """Returns whether the graph of `loss` has a node that runs a backward pass of its own: reentrant checkpointing."""
    if loss.grad_fn is None:
        return False
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes_of(loss.grad_fn))


def free(loss: Tensor) -> None:
    """Frees what the graph of `loss` has saved for its backward pass, as a pass without `retain_graph` does.

    Otherwise the activations of a step would be held until `loss` and all outputs are, beside those of the next.
    """
    for node in nodes_of(loss.grad_fn):
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                saved = getattr(node, name)
                for each in saved if isinstance(saved, list | tuple) else (saved,):
                    # Raises where nothing was saved, and where it has hooks: those of checkpointing hold no tensor.
                    with suppress(RuntimeError):
                        # torch has no call to free a saved tensor. The first hook is called at once, and what it
                        # returns is kept in place of the tensor.
                        each.register_hooks(lambda _: None, _raise_freed)


def _raise_freed(_: Any) -> Tensor:
    raise RuntimeError(
        "Trying to backward through the graph a second time (or directly access saved tensors after they have already "
        "been freed). Specify retain_graph=True if you need to backward through the graph a second time."
    )
