"""torch's fused SGD on the CPU, whose kernel is wrong for 16-bit parameters in torch 2.13 and before."""

from collections.abc import Iterable
from functools import cache

import torch

from gradscale.torch.cast import HALF_DTYPES

Optimizer = torch.optim.Optimizer


def refuse_broken_fused_sgd(optimizers: Iterable[Optimizer]) -> None:
    """Raises if one of the optimizers is a fused SGD that would leave 16-bit parameters as they are."""
    for optimizer in optimizers:
        if (fault := fault_of_fused_sgd(optimizer)) is not None:
            raise RuntimeError(fault)


def fault_of_fused_sgd(optimizer: Optimizer) -> str | None:
    """Returns what is wrong with a fused SGD that would leave 16-bit parameters as they are; None if nothing is."""
    if not isinstance(optimizer, torch.optim.SGD):
        return None
    fused = [parameter for group in optimizer.param_groups if group["fused"] for parameter in group["params"]]
    # What does not fill a vector register, of eight elements or more, is updated correctly.
    if not any(each.dtype in HALF_DTYPES and each.is_cpu and each.numel() >= 8 for each in fused) or not _is_broken():
        return None
    return (
        "torch's fused SGD leaves most elements of FP16 and BF16 parameters on the CPU as they are "
        "(https://github.com/pytorch/pytorch/issues/191763). "
        f"Received: {type(optimizer).__name__} with fused=True, in torch {torch.__version__}. Build it "
        "with `fused=False`, or keep float32 masters with `gradscale.torch.MasterWeights`."
    )


@cache
def _is_broken() -> bool:
    """Returns whether two steps of the kernel give another result than SGD."""
    # By trial, not by version: the end of this workaround is a torch whose kernel is right. 32 fill a vector register.
    weight, momentum = (torch.zeros(32, dtype=torch.float16, device="cpu") for _ in range(2))
    numbers = {"lr": 1.0, "momentum": 0.5, "weight_decay": 0.0, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    for _ in range(2):
        torch._fused_sgd_([weight], [torch.ones_like(weight)], [momentum], **numbers, **flags)  # type: ignore[arg-type]
    return not bool((weight == -2.5).all())  # -1, and -(0.5 + 1) after it
