"""Room three, decide: the core's decision, run on the scaler's device."""

from dataclasses import replace

import torch
from torch import Tensor

from gradscale.decide import decide
from gradscale.policy import Policy, backed_off
from gradscale.record import place
from gradscale.state import Outcome, ScaleState, Seen


class Rule:
    """A policy and its present state, on the device once that is known. The state is replaced, never changed.

    Attributes:
        policy: the rule for the scale.
        state: the state before the next step.
    """

    __slots__ = ("_device", "policy", "state")

    def __init__(self, policy: Policy, state: ScaleState | None = None, device: torch.device | None = None) -> None:
        self.policy = policy
        self.state = policy.start() if state is None else state
        self._device: torch.device | None = None
        if device is not None:
            self.settle(device)

    @property
    def device(self) -> torch.device | None:
        """Where the state lives; None until the first loss has shown which device it is."""
        return self._device

    def settle(self, device: torch.device) -> torch.device:
        """Moves the state to `device` unless it lives somewhere already, and returns where it lives."""
        if self._device is None:
            self._device = device
            self.state = place(self.state, lambda array: torch.as_tensor(array, device=device))
        return self._device

    def load(self, policy: Policy, state: ScaleState) -> None:
        """Takes over another policy and its state, to where the present one lives."""
        self.policy, self.state = policy, state
        device, self._device = self._device, None
        if device is not None:
            self.settle(device)

    def decide(self, seen: Seen, unit: Tensor, clip_norm: float | None) -> Outcome:
        """Returns what follows from `seen`. Does not wait for the device, and changes nothing: `state` is yours to set.

        Args:
            seen: what the gradients looked like, in true units.
            unit: what the gradients are to be divided by. That is the scale, unless they are in true units already, or
                a backward pass was run again at a lower scale and overflowed there too.
            clip_norm: bound on the norm of all gradients together.
        """
        outcome = decide(self.policy, self.state, seen, torch, clip_norm)  # type: ignore[arg-type]
        return replace(outcome, factor=outcome.factor * (self.state.scale / unit))

    def hold(self) -> Outcome:
        """Returns the decision to do nothing at all: neither step nor count."""
        no = torch.zeros((), dtype=torch.bool, device=self._device)
        return Outcome(self.state, no, torch.ones_like(self.state.scale))

    def lower(self) -> Tensor:
        """Backs the scale off once, whatever the hysteresis says, and returns the new scale over the old one."""
        before = self.state.scale
        zero = torch.zeros_like(before)
        overflow = Seen(finite=zero > 0, loss_finite=zero == 0, amax=zero, norm=zero, upper_share=zero)
        self.state = backed_off(self.policy, self.state, overflow, torch)  # type: ignore[arg-type]
        return self.state.scale / before
