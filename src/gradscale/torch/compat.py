"""Differences between the versions of torch, all in one place. A feature is looked for in torch, not in its version.

What a version lacks, and cannot be done in another way, is refused with the first version that has it.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

OLDEST = (2, 6)
"""The oldest version that the tests run with. Before it, `torch.compile` leaves modes out without a word, so that
`emulate` and `casts` would do nothing in a compiled function."""


def check_version(found: str) -> None:
    """Raises ImportError if a version of torch is older than `OLDEST`. Builds from before a release count as it."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and tuple(map(int, numbers.groups())) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"`gradscale.torch` needs torch {oldest} or newer. Found: torch {found}. "
            f'Install a newer one: pip install "torch>={oldest}".'
        )


check_version(torch.__version__)


def uncompiled(reason: str) -> Callable[[Any], Any]:
    """Returns a decorator that keeps a function out of `torch.compile`, and gives the reason where torch takes one."""
    takes_reason = "reason" in inspect.signature(torch.compiler.disable).parameters
    return torch.compiler.disable(reason=reason) if takes_reason else torch.compiler.disable()


def is_exporting() -> bool:
    """Returns whether `torch.export` is running."""
    # Before torch 2.7 there is no such function, and this flag is set by `torch.export` alone.
    asked = getattr(torch.compiler, "is_exporting", None)
    return torch.compiler._is_compiling_flag if asked is None else asked()


def has_grad_dtype() -> bool:
    """Returns whether a tensor can have gradients of another dtype. On older versions `grad_dtype` has no effect."""
    return hasattr(Tensor, "grad_dtype")


def check_grad_fp32(grad_fp32: bool) -> None:
    """Raises NotImplementedError if gradients of 16-bit parameters should be float32 and torch cannot make them."""
    if grad_fp32 and not has_grad_dtype():
        raise NotImplementedError(
            "`grad_fp32=True` needs `Tensor.grad_dtype`, which torch has since 2.10. "
            f"Found: torch {torch.__version__}. Install a newer one, or leave `grad_fp32` out; `clip_norm` works "
            "without it."
        )


def grad_fp32_needs() -> str:
    """Returns the end of a sentence that recommends `grad_fp32`: the version that it needs, where torch is older."""
    return "" if has_grad_dtype() else ", which needs torch 2.10 or newer"


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """Returns the dtype of the gradients that a backward pass makes for a parameter."""
    made = parameter.grad_dtype if has_grad_dtype() else None  # type: ignore[attr-defined]
    return made or parameter.dtype  # None also where any dtype is accepted
