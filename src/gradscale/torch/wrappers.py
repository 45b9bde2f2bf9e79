"""Wrappers of torch around a model, and the names that its parameters have without them."""

from torch import nn

PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of a name that wrappers add anywhere in a model: `torch.compile`, FSDP and activation checkpointing."""

OUTERMOST = (nn.DataParallel, nn.parallel.DistributedDataParallel)
"""Wrappers whose part, `module`, may as well be a name of the user's. They are around the whole model."""


def own_module(module: nn.Module) -> nn.Module:
    """Returns the user's own model: `module` without wrappers around it."""
    while (inner := _inside(module)) is not None:
        module = inner
    return module


def _inside(module: nn.Module) -> nn.Module | None:
    """Returns the module that `module` is a wrapper of, or None."""
    if isinstance(module, OUTERMOST):
        return module.module
    # By its name: the class of a compiled module is in the compiler, which takes a second to import.
    return module._modules.get("_orig_mod")


def own_name(name: str) -> str:
    """Returns the name that a parameter or a module has in the user's own model.

    >>> own_name("body._orig_mod.0.weight")
    'body.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in PARTS)
