"""Functions of torch that are unsafe in half precision, with the reason, and what to use instead."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from gradscale.torch.cast import HALF_DTYPES
from gradscale.torch.casting.aliases import Function, in_place_aliases, torch_aliases
from gradscale.torch.casting.rules import floating


@dataclass(frozen=True, slots=True)
class Ban:
    """A rule that raises an error if a function is called with half-precision tensors.

    Attributes:
        reason: what goes wrong, and what to use instead: complete sentences.
        dtypes: the dtypes it goes wrong in.
        safe_under: device types whose autocast runs the function in float32, where that makes it safe.
    """

    reason: str
    dtypes: tuple[torch.dtype, ...] = HALF_DTYPES
    safe_under: tuple[str, ...] = ()

    def run(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, op: bool) -> Any:
        """Returns the result of the call.

        Raises:
            RuntimeError: an argument is of a dtype that the function is unsafe in.
        """
        del op
        for tensor in floating(args, kwargs):
            if tensor.dtype in self.dtypes and not self._runs_in_float32(tensor.device.type):
                raise RuntimeError(
                    f"`{function.__name__}` is unsafe in half precision. Received: a tensor of {tensor.dtype}. "
                    f"{self.reason} To allow it: `casts(allow=[...])`."
                )
        return function(*args, **kwargs)

    def _runs_in_float32(self, device_type: str) -> bool:
        return device_type in self.safe_under and torch.is_autocast_enabled(device_type)


# The inputs of these have lost the digits that matter when they were rounded to half. Computing in float32 is too late:
# CUDA's autocast raises an error for the first for that reason, and the CPU's returns a wrong loss.
_ROUNDED_AWAY: dict[Function, str] = {
    functional.binary_cross_entropy: "A probability near 1 is rounded to 1, and its loss to 100, whatever the logit "
    "was. Use `binary_cross_entropy_with_logits` on the logits, and no sigmoid.",
    torch.logit: "A probability near 1 is rounded to 1, whose logit is inf. Keep the logits that it was made from.",
    **dict.fromkeys(
        (torch.atanh, torch.arctanh),
        "A value near 1 is rounded to 1, whose atanh is inf. Keep the value from before the `tanh`.",
    ),
    torch.erfinv: "A value near 1 is rounded to 1, whose erfinv is inf. Keep the value from before the `erf`.",
    **dict.fromkeys(
        (torch.acos, torch.arccos),
        "A cosine near 1 is rounded to 1: the angle is 0, and its gradient infinite. Use `atan2(sine, cosine)`.",
    ),
}

# CUDA's autocast runs both (the first: its norm) in float32, by its documented list. The CPU's does not.
_EPS_IS_ZERO: dict[Function, str] = {
    functional.normalize: "Its `eps` of 1e-12 is 0 in FP16: a row of zeros becomes NaN, and one longer than 65504 "
    "becomes 0. Use `normalize(x.float(), ...)`.",
    functional.cosine_similarity: "Its `eps` of 1e-8 is 0 in FP16: a row of zeros gives NaN, and one longer than 65504 "
    "gives 0. Use `cosine_similarity(x.float(), y.float(), ...)`.",
}

BANNED: dict[Function, Ban] = {function: Ban(reason) for function, reason in _ROUNDED_AWAY.items()} | {
    function: Ban(reason, (torch.float16,), ("cuda",)) for function, reason in _EPS_IS_ZERO.items()
}
"""The functions that `casts` does not run on half-precision tensors, unless they are allowed."""


@cache
def bans() -> dict[Function, Ban]:
    """Returns `BANNED` with all aliases of each function, in-place ones included."""
    return {
        alias: ban for function, ban in BANNED.items() for alias in torch_aliases(function) | in_place_aliases(function)
    }
