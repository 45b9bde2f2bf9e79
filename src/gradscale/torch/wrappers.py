"""Wrappers of torch around a model, and the names that its parameters have without them."""

from torch import nn

ADDED = frozenset(["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
"""Parts of a name that wrappers add anywhere in a model: `torch.compile`, FSDP and activation checkpointing."""

OUTERMOST = (nn.DataParallel, nn.parallel.DistributedDataParallel)
"""Wrappers whose part, `module`, may as well be a name of the user's. They are around the whole model."""


def own_module(module: nn.Module) -> nn.Module:
    """Returns the user's own model: `module` without wrappers around it."""
    while (around := isinstance(module, OUTERMOST)) or "_orig_mod" in module._modules:
        module = getattr(module, "module" if around else "_orig_mod")
    return module


def own_name(name: str) -> str:
    """Returns the name that a module or parameter has in the user's own model, by its name there or inside wrappers.

    >>> own_name("body._orig_mod.0.weight")
    'body.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in ADDED)
