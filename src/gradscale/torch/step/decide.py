"""Stage three, decide: the engine's decision, run where the scale is kept."""

from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradscale.engine.decide import decide
from gradscale.engine.measurement import UNKNOWN_RATIO, Measurement, with_amax
from gradscale.policies.contract import Policy, ScaleState, Seen, advanced, backed_off
from gradscale.policies.scalars import EXACT, SCALARS
from gradscale.policies.static import Static
from gradscale.record import place
from gradscale.torch.step import host_copy
from gradscale.torch.step.host_copy import read_now


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


class Rule:
    """A policy and its present state: in host memory if the scale is kept on the CPU, else on the device.

    On a device the rule runs on 0-d tensors, so that nothing synchronizes. In host memory it runs on numpy scalars,
    which is ten times as fast as tiny tensor operations. Both give the same bits. The state is replaced, never changed.

    Attributes:
        policy: the rule for the scale.
        state: the state before the next step.
        amax_ratio: last ratio of the largest magnitude to the norm, a leaf.
        steps: steps decided so far. Known on the host, where it chooses the steps that read the largest magnitude.
        lowest_scale: a lower bound of the scale, known on the host: the policy's, or the scale itself if it is fixed.
    """

    __slots__ = ("_device", "_hosted", "amax_ratio", "lowest_scale", "policy", "state", "steps")

    def __init__(self, policy: Policy, state: ScaleState | None = None, device: torch.device | None = None) -> None:
        self._device: torch.device | None = None
        self._hosted = False
        self.load(policy, policy.start() if state is None else state)
        if device is not None:
            self.settle(device)

    @property
    def device(self) -> torch.device | None:
        """Where the scale is kept; None before the first loss, which decides it."""
        return self._device

    @property
    def scale(self) -> Tensor:
        """The scale of the next step, a 0-d float32 tensor."""
        return self.tensor(self.state.scale)

    @property
    def xp(self) -> Any:
        """The namespace for leaves of the state."""
        return SCALARS if self._hosted else torch

    def leaf(self, value: Any) -> Any:
        """Returns a 0-d tensor on the device as a leaf of the state. Does not copy it where tensors are leaves.

        A numpy number, a default for what was not measured, is returned as it is.
        """
        return _NUMPY[value.dtype](read_now(value)) if self._hosted and isinstance(value, Tensor) else value

    def tensor(self, leaf: Any) -> Tensor:
        """Returns a leaf of the state as a 0-d tensor on the device. Does not synchronize with the device."""
        if self._hosted:
            # Exact through a Python number: a double holds every float32 and int32.
            return torch.tensor(leaf.item(), dtype=_TORCH[type(leaf)], device=self._device)
        if isinstance(leaf, Tensor) or self._device is None:
            return torch.as_tensor(leaf, device=self._device)  # its own, not torch's default device
        return self._filled(leaf)  # a number of numpy's, which stands for what was not measured

    def _filled(self, number: Any) -> Tensor:
        """Returns a number of numpy's as a 0-d tensor on the device."""
        # Filled in: a copy of the number to the device would synchronize.
        return torch.full((), number.item(), dtype=_TORCH[type(number)], device=self._device)

    def measurement(self, measurement: Measurement) -> Measurement:
        """Returns a measurement with leaves in place of tensors, without its sizes, which no decision needs."""
        return Measurement(None, *(None if found is None else self.leaf(found) for found in measurement[1:]))

    def leaves(self, seen: Seen) -> Seen:
        """Returns `seen` with leaves in place of tensors."""
        return Seen(*(self.leaf(getattr(seen, field.name)) for field in fields(Seen)))

    def tensors(self, seen: Seen) -> Seen:
        """Returns `seen` with tensors in place of leaves."""
        return Seen(*(self.tensor(getattr(seen, field.name)) for field in fields(Seen)))

    def settle(self, device: torch.device) -> torch.device:
        """Moves the state to `device` unless it is kept somewhere already, and returns where it is kept."""
        if self._device is None:
            self._device = device
            # numpy 1 makes float64 of a float32 scalar times a Python number: with it, tensors are leaves here too.
            self._hosted = EXACT and host_copy.in_host_memory(device)
            self.state = place(self.state, self._put)
            self.amax_ratio = self._put(self.amax_ratio)
        return self._device

    def _put(self, array: Any) -> Any:
        number = array[()]
        return number if self._hosted else self._filled(number)

    def load(self, policy: Policy, state: ScaleState, amax_ratio: float = UNKNOWN_RATIO) -> None:
        """Loads another policy and its state, given as numpy numbers, on the device of the present one."""
        self.policy, self.state, self.amax_ratio = policy, state, np.float32(amax_ratio)
        self.steps = int(state.applied) + int(state.skipped)
        self.lowest_scale = float(state.scale if isinstance(policy, Static) else getattr(policy, "min_scale", 0.0))
        device, self._device = self._device, None  # `settle` does nothing while it is set
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

    @np.errstate(all="ignore")
    def after(self, state: ScaleState, seen: Seen) -> ScaleState:
        """Returns the state that follows `state` once `seen`, in leaves, was seen. Does not synchronize."""
        return advanced(self.policy, state, seen, self.xp)

    def hold(self, seen: Seen) -> Decision:
        """Returns the decision of a step without gradients, which is neither applied nor counted."""
        no = torch.zeros((), dtype=torch.bool, device=self._device)
        return Decision(self.state, no, torch.ones_like(self.scale), seen, self.amax_ratio, attempted=False)

    @np.errstate(all="ignore")
    def lowered(self, state: ScaleState) -> ScaleState:
        """Returns `state` backed off once, without hysteresis. Does not synchronize with the device."""
        overflow = place(Seen(finite=np.bool_(False)), self._put)
        return backed_off(self.policy, state, overflow, self.xp)


_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.int32: np.int32, torch.bool: np.bool_}
_TORCH = {kind: dtype for dtype, kind in _NUMPY.items()}
