"""torch's fused SGD on the CPU, whose kernel is wrong for 16-bit parameters in torch 2.13 and before."""

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from gradscale.torch.cast import HALF_DTYPES

Optimizer = torch.optim.Optimizer

NARROWEST, WIDEST = 8, 32
"""16-bit elements that a vector register holds, at least and at most. What does not fill one is updated correctly."""


def refuse_broken_fused_sgd(optimizers: Iterable[Optimizer]) -> None:
    """Raises if one of the optimizers is a fused SGD that would leave 16-bit parameters as they are."""
    for optimizer in optimizers:
        if (fault := fault_of_fused_sgd(optimizer)) is not None:
            raise RuntimeError(fault)


def fault_of_fused_sgd(optimizer: Optimizer) -> str | None:
    """Returns what is wrong if this is a fused SGD that would leave 16-bit parameters as they are; None if it is not.

    Costs nothing without a fused SGD.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return None
    for group in optimizer.param_groups:
        if group["fused"] and _has_long_half_on_cpu(group["params"]) and _is_broken():
            return (
                "torch's fused SGD leaves most elements of FP16 and BF16 parameters on the CPU as they are "
                "(https://github.com/pytorch/pytorch/issues/191763). "
                f"Received: {type(optimizer).__name__} with fused=True, in torch {torch.__version__}. Build it "
                "with `fused=False`, or keep float32 masters with `gradscale.torch.MasterWeights`."
            )
    return None


def _has_long_half_on_cpu(parameters: Sequence[Tensor]) -> bool:
    # The set first: it takes a third of the time, at every step, and is nearly always enough.
    dtypes = {parameter.dtype for parameter in parameters}
    return not dtypes.isdisjoint(HALF_DTYPES) and any(
        parameter.is_cpu and parameter.dtype in HALF_DTYPES and parameter.numel() >= NARROWEST
        for parameter in parameters
    )


@cache
def _is_broken() -> bool:
    """Returns whether two steps of the kernel give another result than SGD."""
    # By trial, not by version: the end of this workaround is a torch whose kernel is right.
    weight, momentum = (torch.zeros(WIDEST, dtype=torch.float16, device="cpu") for _ in range(2))
    for _ in range(2):
        torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage]
            [weight],
            [torch.ones_like(weight)],
            [momentum],
            weight_decay=0.0,
            momentum=0.5,
            lr=1.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
    return not bool((weight == -2.5).all())  # -1, and -(0.5 + 1) after it
