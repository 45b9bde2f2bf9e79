"""Functions of torch's that must not be given half-precision tensors, why, and what to use instead."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from gradscale.torch.casting.arguments import floating
from gradscale.torch.casting.names import in_place_names, torch_names

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Ban:
    """Refuses to run a function on half-precision tensors.

    Attributes:
        reason: what goes wrong, and what to use instead: whole sentences.
        dtypes: the types it goes wrong in.
        safe_under: device types whose autocast runs the function in float32, where that is enough.
    """

    reason: str
    dtypes: tuple[torch.dtype, ...] = HALVES
    safe_under: tuple[str, ...] = ()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, op: bool) -> Any:
        """Returns what `function` makes of the arguments, none of which is of a type it goes wrong in.

        Args:
            function: what was called.
            args: with these.
            kwargs: and these.
            op: whether `function` is an operation of torch's, not a Python function.

        Raises:
            RuntimeError: one of them is.
        """
        del op
        for tensor in floating(args, kwargs):
            if tensor.dtype in self.dtypes and not self._widened(tensor.device.type):
                raise RuntimeError(
                    f"`{function.__name__}` is unsafe in half precision. Received: a tensor of {tensor.dtype}. "
                    f"{self.reason} If you know better: `casts(allow=[...])`."
                )
        return function(*args, **kwargs)

    def _widened(self, device_type: str) -> bool:
        return device_type in self.safe_under and torch.is_autocast_enabled(device_type)


# What goes into these has lost, when it was rounded to half, what they look at. To compute them in float32 is too late:
# CUDA's autocast refuses the first for that, and the CPU's returns a loss that is wrong.
_ROUNDED_AWAY: dict[Callable[..., Any], str] = {
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
_EPS_IS_ZERO: dict[Callable[..., Any], str] = {
    functional.normalize: "Its `eps` of 1e-12 is 0 in FP16: a row of zeros becomes NaN, and one longer than 65504 "
    "becomes 0. Use `normalize(x.float(), ...)`.",
    functional.cosine_similarity: "Its `eps` of 1e-8 is 0 in FP16: a row of zeros gives NaN, and one longer than 65504 "
    "gives 0. Use `cosine_similarity(x.float(), y.float(), ...)`.",
}

BANNED: dict[Callable[..., Any], Ban] = {function: Ban(reason) for function, reason in _ROUNDED_AWAY.items()} | {
    function: Ban(reason, (torch.float16,), ("cuda",)) for function, reason in _EPS_IS_ZERO.items()
}
"""The functions that `casts` refuses to run on half-precision tensors, unless they are allowed."""


@cache
def bans() -> dict[Callable[..., Any], Ban]:
    """Returns `BANNED` with every name that torch has for each of its functions, in-place ones included."""
    return {name: ban for function, ban in BANNED.items() for name in torch_names(function) | in_place_names(function)}
