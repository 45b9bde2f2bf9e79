"""A step of a rule as an operator of torch: on CUDA it is the kernel, on the CPU the rule of the host."""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscale.engine.packed import Packed
from gradscale.kernels.triton.kernel import jitted, launch
from gradscale.policies.contract import Policy

_RULES: list[Packed] = []
"""The rules of the operator, which takes no objects, by their numbers."""


@cache
def number_of(rule: Packed) -> int:
    """Returns the number by which the operator knows a rule."""
    _RULES.append(rule)
    return len(_RULES) - 1


@torch.library.custom_op("gradscale::advance", mutates_args=(), device_types="cpu")
def advance(state: Tensor, numbers: Tensor, first: int, end: int, clip_norm: float, rule: int) -> Tensor:
    """Returns the state of a rule after a step, as `Packed` packs it. Does not synchronize.

    Args:
        state: the packed state before it.
        numbers: what was read, in float32: as in `Packed.read`.
        first: as there.
        end: as there.
        clip_norm: bound on the norm, if gradients are clipped.
        rule: the number of the rule.
    """
    packed = _RULES[rule]
    with np.errstate(all="ignore"):
        read = packed.read(numbers.numpy(), first, end, clip_norm)
        return torch.from_numpy(packed.on_host(state.numpy(), read))


@advance.register_kernel("cuda")
def _(state: Tensor, numbers: Tensor, first: int, end: int, clip_norm: float, rule: int) -> Tensor:
    following = torch.empty_like(state)
    launch(_kernel(rule), state, numbers, following, first, end, clip_norm)
    return following


@cache
def _kernel(rule: int) -> Any:
    return jitted(_RULES[rule])


@advance.register_fake
def _(state: Tensor, numbers: Tensor, first: int, end: int, clip_norm: float, rule: int) -> Tensor:
    return torch.empty_like(state)


def refusal(policy: Policy, device: torch.device) -> str:
    """Returns why a device cannot run a rule, or nothing if it can: a kernel is compiled, and launched once."""
    if not vars(type(policy)).get("is_compiled"):
        return f"`{type(policy).__name__}` does not have `is_compiled = True`."
    try:
        packed = Packed(policy, norm=True, amax=True, clips=True)
        state = torch.zeros(len(packed.kinds), dtype=torch.int32, device=device)
        advance(state, torch.ones(4, device=device), 1, 2, 1.0, number_of(packed))
    except Exception as error:  # whatever a compiler, a driver or a rule of a user raises: there is another way
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return ""
