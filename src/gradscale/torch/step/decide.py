"""Stage three, decide: the engine's decision, run where the scale is kept."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradscale.engine.decide import decide
from gradscale.engine.measurement import UNKNOWN_RATIO, with_amax
from gradscale.policies.contract import Policy, ScaleState, Seen, backed_off
from gradscale.policies.static import Static
from gradscale.record import place
from gradscale.torch.step.numbers import Numbers


class Decision(NamedTuple):
    """The decision of a step, the same for every device, rank and optimizer that shares the scale.

    Attributes:
        state: the state of the next step.
        applied: the gate, a 0-d bool tensor.
        factor: what every gradient is multiplied by, a 0-d float32 tensor: unscaling and clipping in one number.
        seen: the facts it was made from, in leaves.
        amax_ratio: the ratio of amax to norm for the next steps, a leaf.
        known: whether the step is applied, where the host has read it.
        attempted: whether there were gradients to decide on.
    """

    state: Any
    applied: Tensor
    factor: Tensor
    seen: Seen
    amax_ratio: Any
    known: bool | None = None
    attempted: bool = True


class Position(NamedTuple):
    """Where a rule is between two steps.

    Attributes:
        state: its state.
        amax_ratio: as in `Rule`.
        steps: as in `Rule`.
    """

    state: ScaleState
    amax_ratio: Any
    steps: int


class Rule(Numbers):
    """A policy and its present state: in host memory if the scale is kept on the CPU, else on the device.

    Before the first loss, which decides where that is, its `device` is None. The state is replaced, never changed.

    Attributes:
        policy: the rule for the scale.
        state: the state before the next step.
        amax_ratio: last ratio of the largest magnitude to the norm, a leaf.
        steps: steps decided so far. Known on the host, where it chooses the steps that read the largest magnitude.
        default: what is seen of a step of which nothing is measured, in leaves.
        lowest_scale: a lower bound of the scale, known on the host: the policy's, or the scale itself if it is fixed.
    """

    __slots__ = ("amax_ratio", "default", "lowest_scale", "policy", "state", "steps")

    def __init__(
        self,
        policy: Policy,
        state: ScaleState | None = None,
        device: torch.device | None = None,
        amax_ratio: float = UNKNOWN_RATIO,
    ) -> None:
        super().__init__(None)
        self.default = Seen()
        self.load(policy, policy.start() if state is None else state, amax_ratio)
        if device is not None:
            self.settle(device)

    @property
    def scale(self) -> Tensor:
        """The scale of the next step, a 0-d float32 tensor."""
        return self.tensor(self.state.scale)

    @property
    def position(self) -> Position:
        """Where the rule is now."""
        return Position(self.state, self.amax_ratio, self.steps)

    def go_back(self, position: Position) -> None:
        """Goes back to where the rule was."""
        self.state, self.amax_ratio, self.steps = position

    def settle(self, device: torch.device) -> torch.device:
        """Moves the state to `device` unless it is kept somewhere already, and returns where it is kept."""
        if self.device is not None:
            return self.device
        self._use(device)
        self.state = place(self.state, self._put)
        self.default = place(Seen(), self._put)
        self.amax_ratio = self._put(self.amax_ratio)
        return device

    def _put(self, array: Any) -> Any:
        number = array[()]
        return number if self.hosted else self._filled(number)

    def load(self, policy: Policy, state: ScaleState, amax_ratio: float = UNKNOWN_RATIO) -> None:
        """Loads another policy and its state, given as numpy numbers, on the device of the present one."""
        self.policy, self.state, self.amax_ratio = policy, state, np.float32(amax_ratio)
        self.steps = int(state.applied) + int(state.skipped)
        self.lowest_scale = float(state.scale if isinstance(policy, Static) else getattr(policy, "min_scale", 0.0))
        device, self.device = self.device, None  # `settle` does nothing while it is set
        if device is not None:
            self.settle(device)

    # numpy warns where a scalar overflows or is divided by 0, and a device does not: inf and NaN are facts here.
    @np.errstate(all="ignore")
    def decide(
        self, seen: Seen, divisor: Tensor, clip_norm: float | None, *, follows_amax: bool = False, measured: bool = True
    ) -> Decision:
        """Returns what follows from `seen`. Changes nothing: `commit` does. Does not synchronize with the device.

        Args:
            seen: what was measured, unscaled, in leaves.
            divisor: what the gradients must be divided by: the scale, unless they are unscaled already, or a backward
                pass was run again at a lower scale and overflowed there too.
            clip_norm: bound on the norm of all gradients together.
            follows_amax: whether the policy needs the largest magnitude where a norm is read at every step.
            measured: whether this step has measured it. It is estimated from the norm otherwise.
        """
        ratio = self.amax_ratio
        if follows_amax:
            seen, ratio = with_amax(seen, ratio, self.xp, measured=measured)
        outcome = decide(self.policy, self.state, seen, self.xp, clip_norm, self.leaf(divisor))
        return Decision(outcome.state, self.tensor(outcome.applied), self.tensor(outcome.factor), seen, ratio)

    def commit(self, decision: Decision) -> None:
        """Makes the state that was decided the present one."""
        # `hold` returns the present state itself: a step without gradients is not counted.
        self.steps += decision.state is not self.state
        self.state, self.amax_ratio = decision.state, decision.amax_ratio

    def hold(self, seen: Seen) -> Decision:
        """Returns the decision of a step without gradients, which is neither applied nor counted."""
        no = torch.zeros((), dtype=torch.bool, device=self.device)
        return Decision(self.state, no, torch.ones_like(self.scale), seen, self.amax_ratio, attempted=False)

    @np.errstate(all="ignore")
    def lowered(self, state: ScaleState) -> ScaleState:
        """Returns `state` backed off once, without hysteresis. Does not synchronize with the device."""
        overflow = replace(self.default, finite=self.xp.logical_not(self.default.finite))
        return backed_off(self.policy, state, overflow, self.xp)
