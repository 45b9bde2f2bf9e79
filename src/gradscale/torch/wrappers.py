"""Wrappers of torch around a model, and the names that its parameters have without them."""

from torch import nn

PARTS = {
    "_orig_mod": "torch._dynamo.",
    "_fsdp_wrapped_module": "torch.distributed.fsdp.",
    "_checkpoint_wrapped_module": "torch.distributed.algorithms.",
}
"""Parts of a name that wrappers add anywhere in a model, and where torch has the wrapper: `torch.compile`, FSDP and
activation checkpointing."""

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
    return module._modules["_orig_mod"] if is_added(module, "_orig_mod") else None


def is_added(module: nn.Module, child: str) -> bool:
    """Returns whether `module` is a wrapper, and `child` its name for what it wraps."""
    if child not in PARTS or child not in module._modules:
        return False
    # By where it is defined: to import the class of a compiled module, in the compiler, takes a second.
    return any(base.__module__.startswith(PARTS[child]) for base in type(module).__mro__)


def own_name(name: str, module: nn.Module | None = None) -> str:
    """Returns the name that a parameter has in the user's own model.

    Args:
        name: its name with what wrappers add.
        module: where it has this name. Without it, the names that wrappers use are taken for theirs.

    >>> own_name("body._orig_mod.0.weight")
    'body.0.weight'
    """
    parts = name.split(".")
    if module is None:
        return ".".join(part for part in parts if part not in PARTS)
    kept: list[str] = []
    at: nn.Module | None = module
    for part in parts:
        # Some wrappers leave their part out of the names themselves.
        while at is not None and part not in at._modules and (added := _added(at)):
            at = at._modules[added]
        if at is None or not is_added(at, part):
            kept.append(part)
        at = None if at is None else at._modules.get(part)
    return ".".join(kept)


def _added(module: nn.Module) -> str | None:
    """Returns the name that `module` has for what it wraps, or None if it is no wrapper."""
    return next((part for part in PARTS if is_added(module, part)), None)
