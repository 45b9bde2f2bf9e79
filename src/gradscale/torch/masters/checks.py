"""What `MasterWeights` refuses, and how it says so."""

from typing import Any

import torch

Optimizer = torch.optim.Optimizer


def check_inside(optimizer: Any) -> None:
    """Raises unless this is an optimizer that can be stepped on masters."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "`optimizer` must be a torch optimizer built on the model's parameters. "
            f"Received: {type(optimizer).__name__}."
        )
    if getattr(optimizer, "keeps_masters", False):
        raise TypeError("`optimizer` keeps masters already. Wrap an optimizer once.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS evaluates the loss itself, between its own updates of the parameters, and cannot be stepped on "
            "masters. Keep the model's parameters in float32 for it."
        )
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ValueError(
            "A scheduler has been built on this optimizer, and what it changes would not be seen. "
            "Build it on the `MasterWeights` instead, after wrapping."
        )
