"""Whether a backward pass runs in BF16, where no loss scaling is needed."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradscale.engine.bf16 import may_be_noted, note_bf16
from gradscale.policies.contract import Policy

MOST_NODES = 10_000
"""Nodes of a graph that are looked at. About 0.5 us each, once for each scaler."""

OFF = {"LossScaler": "LossScaler(model, policy=NoScaling())", "GradScaler": "GradScaler(enabled=False)"}
"""How each scaler is switched off."""

NARROW = {torch.float16, torch.float8_e4m3fn, torch.float8_e5m2}
"""Types whose range is too small for unscaled gradients."""


@dataclass(slots=True)
class FirstLoss:
    """What the first loss of a scaler shows: whether its backward pass runs in BF16.

    Attributes:
        seen: whether there was one. Never reset, so that later losses are not looked at.
        in_bf16: whether its backward pass runs in BF16.
    """

    seen: bool = False
    in_bf16: bool = False

    def note(self, loss: Tensor, policy: Policy, scaler: str) -> None:
        """Looks at a loss if it is the first, and logs that scaling is not needed if its backward pass runs in BF16.

        `scaler` is the name of the scaler's class. Reads no values.
        """
        if self.seen:
            return
        self.seen, self.in_bf16 = True, _runs_in_bf16(loss)
        if self.in_bf16 and may_be_noted(policy):
            note_bf16(
                f"A {scaler} scales a loss whose backward pass runs in BF16.",
                f"Leave the scaler out, or switch it off: `{OFF[scaler]}`.",
            )


def _runs_in_bf16(loss: Tensor) -> bool:
    """Returns whether the backward pass of `loss` runs in BF16, and nowhere in a narrower type. Reads no values.

    `torch.autocast` has usually ended when a loss is scaled, and the loss is float32: the graph shows what was computed
    in BF16. A compiled model shows the types of its outputs alone.
    """
    dtypes = _dtypes(loss)
    kind = loss.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    return torch.bfloat16 in dtypes and not dtypes & NARROW


def _dtypes(loss: Tensor) -> set[torch.dtype]:
    """Returns the types of all gradients that the backward pass of `loss` computes."""
    dtypes = {loss.dtype}
    pending: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None, *pending}
    while pending and len(seen) <= MOST_NODES:
        node = pending.pop()
        # torch keeps what a node's inputs are, to check the gradients given to it. Not public, so it may be missing.
        dtypes.update(kept.dtype for kept in getattr(node, "_input_metadata", ()))
        following = {each for each, _ in getattr(node, "next_functions", ())} - seen
        seen |= following
        pending += following
    return dtypes
