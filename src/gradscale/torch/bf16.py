"""Whether a scaler scales a loss in BF16, where no loss scaling is needed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradscale.engine.bf16 import note_bf16
from gradscale.policies.contract import Policy

OFF = {"LossScaler": "LossScaler(model, policy=NoScaling())", "GradScaler": "GradScaler(enabled=False)"}
"""How each scaler is switched off."""


@dataclass(slots=True)
class FirstLoss:
    """What the first loss of a scaler shows: whether its backward pass runs in BF16.

    Attributes:
        seen: whether there was one. Never reset, so that later losses are not looked at.
        in_bf16: whether the loss is BF16, or was scaled inside a block of autocast to BF16.
    """

    seen: bool = False
    in_bf16: bool = False

    def note(self, loss: Tensor, policy: Policy, scaler: str) -> None:
        """Looks at a loss if it is the first, and logs that scaling is not needed if its backward pass runs in BF16.

        `scaler` is the name of the scaler's class. Looks at types only.
        """
        if self.seen:
            return
        dtypes, kind = {loss.dtype}, loss.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtypes.add(torch.get_autocast_dtype(kind))
        self.seen, self.in_bf16 = True, torch.bfloat16 in dtypes and torch.float16 not in dtypes
        if self.in_bf16:
            note_bf16(
                policy,
                f"A {scaler} scales a loss whose backward pass runs in BF16.",
                f"Leave the scaler out, or switch it off: `{OFF[scaler]}`.",
            )
