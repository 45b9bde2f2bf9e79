"""The `eps` that optimizers add to a denominator, where FP16 rounds it to 0."""

from typing import Any

import torch

from gradscale.formats import FP16

Optimizer = torch.optim.Optimizer


def lost_eps(optimizer: Optimizer) -> float | None:
    """Returns an `eps` of the optimizer that FP16 does not hold, of a group with FP16 parameters; else None.

    >>> lost_eps(torch.optim.Adam(torch.nn.Linear(2, 2).half().parameters()))
    1e-08
    """
    for group in optimizer.param_groups:
        if any(parameter.dtype is torch.float16 for parameter in group["params"]):
            for eps in _numbers(group.get("eps")):
                if eps < FP16.smallest_subnormal:
                    return eps
    return None


def _numbers(eps: Any) -> list[float]:
    """Returns the numbers of an `eps`. Adafactor has two, of which one may be None, and SGD has none."""
    return [float(each) for each in (eps if isinstance(eps, tuple | list) else (eps,)) if each is not None]
