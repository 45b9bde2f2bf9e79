"""Room three, decide: the core's decision, run where the scale lives."""

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscale.engine.decide import Outcome, decide
from gradscale.engine.host import EXACT, SCALARS
from gradscale.policies.contract import Policy, ScaleState, Seen, backed_off
from gradscale.record import place
from gradscale.torch.step import host_copy as letter
from gradscale.torch.step.host_copy import peek


class Rule:
    """A policy and its present state: in the host's memory if the scale lives on the CPU, else on the device.

    There the rule runs on 0-d tensors, for nothing may wait. Here it runs on numpy scalars, ten times as fast: a small
    model's step is over sooner than fifty tiny tensor operations. Both give the same bits. The state is replaced, never
    changed.

    Attributes:
        policy: the rule for the scale.
        state: the state before the next step.
    """

    __slots__ = ("_device", "_hosted", "policy", "state")

    def __init__(self, policy: Policy, state: ScaleState | None = None, device: torch.device | None = None) -> None:
        self.policy = policy
        self.state = policy.start() if state is None else state
        self._device: torch.device | None = None
        self._hosted = False
        if device is not None:
            self.settle(device)

    @property
    def device(self) -> torch.device | None:
        """Where the scale lives; None until the first loss has shown which device it is."""
        return self._device

    @property
    def scale(self) -> Tensor:
        """The scale of the next step, a 0-d float32 tensor."""
        return self.tensor(self.state.scale)

    @property
    def xp(self) -> Any:
        """The namespace for leaves of the state."""
        return SCALARS if self._hosted else torch

    def leaf(self, value: Tensor) -> Any:
        """Returns a 0-d tensor on the device as a leaf of the state. Does not copy it where tensors are leaves."""
        return _NUMPY[value.dtype](peek(value)) if self._hosted else value

    def tensor(self, leaf: Any) -> Tensor:
        """Returns a leaf of the state as a 0-d tensor on the device."""
        if self._hosted:
            return torch.tensor(leaf.item(), dtype=_TORCH[type(leaf)], device=self._device)
        return torch.as_tensor(leaf, device=self._device)

    def leaves(self, seen: Seen) -> Seen:
        """Returns what was seen with leaves in place of tensors."""
        return Seen(*(self.leaf(getattr(seen, field.name)) for field in fields(Seen)))

    def tensors(self, seen: Seen) -> Seen:
        """Returns what was seen with tensors in place of leaves."""
        return Seen(*(self.tensor(getattr(seen, field.name)) for field in fields(Seen)))

    def settle(self, device: torch.device) -> torch.device:
        """Moves the state to `device` unless it lives somewhere already, and returns where it lives."""
        if self._device is None:
            self._device = device
            self._hosted = EXACT and letter.free_to_look(device)
            self.state = place(self.state, self._put)
        return self._device

    def _put(self, array: Any) -> Any:
        return array[()] if self._hosted else torch.as_tensor(array, device=self._device)

    def load(self, policy: Policy, state: ScaleState) -> None:
        """Takes over another policy and its state, to where the present one lives."""
        self.policy, self.state = policy, state
        device, self._device = self._device, None
        if device is not None:
            self.settle(device)

    @np.errstate(all="ignore")
    def decide(self, seen: Seen, unit: Tensor, clip_norm: float | None) -> Outcome:
        """Returns what follows from `seen`. Does not wait for the device, and changes nothing: `state` is yours to set.

        Args:
            seen: what the gradients looked like, in true units and in leaves.
            unit: what the gradients are to be divided by. That is the scale, unless they are in true units already, or
                a backward pass was run again at a lower scale and overflowed there too.
            clip_norm: bound on the norm of all gradients together.
        """
        outcome = decide(self.policy, self.state, seen, self.xp, clip_norm)
        factor = outcome.factor * (self.state.scale / self.leaf(unit))
        return Outcome(outcome.state, self.tensor(outcome.applied), self.tensor(factor))

    @np.errstate(all="ignore")
    def after(self, state: ScaleState, seen: Seen) -> ScaleState:
        """Returns the state that follows `state` once `seen`, in leaves, was seen. Does not wait for the device."""
        return self.policy.next(state, seen, self.xp)

    def hold(self) -> Outcome:
        """Returns the decision to do nothing at all: neither step nor count."""
        no = torch.zeros((), dtype=torch.bool, device=self._device)
        return Outcome(self.state, no, torch.ones_like(self.scale))

    @np.errstate(all="ignore")
    def lower(self) -> Tensor:
        """Backs the scale off once, whatever the hysteresis says, and returns the new scale over the old one."""
        before = self.state.scale
        overflow = place(Seen(finite=np.bool_(False)), self._put)
        self.state = backed_off(self.policy, self.state, overflow, self.xp)
        return self.tensor(self.state.scale / before)


_NUMPY = {torch.float32: np.float32, torch.int32: np.int32, torch.bool: np.bool_}
_TORCH = {kind: dtype for dtype, kind in _NUMPY.items()}
