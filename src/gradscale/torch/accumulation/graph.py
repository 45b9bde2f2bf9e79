"""Graphs whose backward pass is run more than once: what they hide, and their memory afterwards."""

from contextlib import suppress
from typing import Any

from torch import Tensor

from gradscale.torch.accumulation.leaves import nodes_of


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
