"""The scale of the reference: the policy itself, on numpy numbers, with what the reference knows of the gradients."""

from collections.abc import Sequence

import numpy as np
from tests.torch.fuzz.gradient import Gradient
from tests.torch.fuzz.policies import POLICIES

from gradscale.policies.contract import Seen, backed_off


class ScaleRule:
    """A policy and its state.

    Attributes:
        policy: the rule.
        state: its state, in numpy numbers.
        estimates: whether the last step had the scaler estimate the largest gradient, which the rule cannot follow.
    """

    def __init__(self, name: str) -> None:
        self.policy = POLICIES[name]()
        self.state = self.policy.start()
        self.estimates = False

    @property
    def scale(self) -> float:
        """The scale of the next step, as a float32."""
        return float(np.float32(self.state.scale))

    @property
    def scales(self) -> bool:
        """Whether anything is scaled and checked at all."""
        return bool(self.policy.needs)

    def share(self, gradients: Sequence[Gradient], scale: float) -> float:
        """Returns the share of scaled elements above the edge that the policy watches."""
        if "upper_share" not in self.policy.needs:
            return 0.0
        above = sum(int((~(each.parts.abs() * scale <= self.policy.edge_magnitude)).sum()) for each in gradients)  # type: ignore[attr-defined]
        return above / max(1, sum(each.parts.numel() for each in gradients))

    @np.errstate(all="ignore")
    def step(self, *, finite: bool, loss_finite: bool, amax: float, share: float, norm_read: bool) -> None:
        """Takes the state after a step."""
        steps = int(self.state.applied) + int(self.state.skipped)
        self.estimates = "amax" in self.policy.needs and norm_read and not (steps < 16 or steps % 16 == 0)
        seen = Seen(
            finite=np.bool_(finite),
            loss_finite=np.bool_(loss_finite),
            amax=np.float32(amax if finite else np.inf),
            upper_share=np.float32(share),
        )
        self.state = self.policy.next(self.state, seen, np)

    @np.errstate(all="ignore")
    def lowered(self, scale: float) -> bool:
        """Lowers the scale once for a retry; returns False where that does not bring it below `scale`."""
        state = backed_off(self.policy, self.state, Seen(finite=np.bool_(False)), np)
        if not state.scale < scale:
            return False
        self.state = state
        return True
