"""The host's side of a step: copies of device numbers, the facts of a step, and the rule that follows them."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradscale.engine.host import estimate_on_host, on_host, ratio_on_host, rule_on_host
from gradscale.engine.measurement import UNKNOWN_RATIO
from gradscale.engine.packed import START, Outcome, Packed
from gradscale.engine.plan import Plan
from gradscale.policies.contract import Policy, ScaleState, Seen, backed_off, counted_as_applied
from gradscale.policies.static import multiplies

OVERFLOW = Seen(finite=np.bool_(False))
"""What is seen of a step that overflows."""


class HostCopy:
    """A copy of a vector of device numbers in host memory, made without synchronizing.

    On the CPU it is ready at once. On an accelerator the copy is queued behind earlier work, and an event is recorded
    after it.
    """

    __slots__ = ("_arrival", "_host")

    def __init__(self, vector: Tensor) -> None:
        self._arrival: torch.Event | None = None
        self._host = vector
        if vector.device.type != "cpu":
            self._host = vector.to("cpu", non_blocking=True)
            # Recorded after the copy on the same stream: the host memory is not valid before the event is reached.
            self._arrival = torch.Event(vector.device)
            self._arrival.record()

    @property
    def arrived(self) -> bool:
        """Whether `read` would return at once."""
        return self._arrival is None or self._arrival.query()

    def read(self) -> list[float]:
        """Returns the numbers. Synchronizes with the device until they have arrived."""
        if not self.arrived:
            self._arrival.synchronize()  # type: ignore[union-attr]
        return self._host.tolist()


def to_device(value: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns `value` on `device`. Synchronizes only where it is copied to the host: gradients may be kept there."""
    if value.device == device and dtype is None:
        return value
    # Memory of the host is not valid before a copy has arrived; on a device, kernels are queued behind the copy.
    return value.to(device, dtype, non_blocking=device.type != "cpu")


def filled(number: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a number as a 0-d tensor on `device`: filled in, as a copy of it to the device would synchronize."""
    return torch.full((), number, dtype=dtype, device=device)


def in_host_memory(device: torch.device) -> bool:
    """Returns whether what is on `device` is in host memory, so that reading it does not synchronize."""
    return device.type == "cpu"


def host_value(value: Tensor) -> float | None:
    """Returns a number that is in host memory, or None for one on another device. Never synchronizes."""
    return value.item() if in_host_memory(value.device) else None


def shown(value: Any) -> Any:
    """Returns a number that is in host memory, and for a tensor on another device the text `<on ...>`."""
    if not isinstance(value, Tensor):
        return value.item() if hasattr(value, "item") else value
    number = host_value(value)
    return f"<on {value.device}>" if number is None else number


@dataclass(eq=False)
class Facts:
    """What a step has seen of gradients and losses, the same on all ranks: in host memory, or on its way there.

    Attributes:
        found: what was seen, as numpy scalars; None until the host has it.
        copy: numbers on their way to the host, in which `read` finds it.
        read: as said.
        sizes: the size of each gradient of this rank, on the device; None where only a flag for all of them is known.
        attempted: whether a rank has gradients. On an accelerator, where the host does not read it, taken to be so.
        norm: returns the unscaled norm over all ranks, on the device.
        found_inf: returns 1 if the step is not applied, else 0, on the device.
        after: where the device follows the rule, returns the state after the step, and what it has found, once `seen`
            has been called; None where the host follows it.
        vector: both, packed, on the device; None likewise.
        divisor: what unscales and clips the gradients, on the device; None likewise.
        live: whether they change without a step of Python, as those of a captured step do: they are read when asked.
        loss_gates: whether a loss that is not finite keeps finite gradients from being applied.
    """

    found: Seen | None = None
    copy: HostCopy | None = None
    read: Callable[[list[float]], Seen] | None = None
    sizes: Tensor | None = None
    attempted: bool = True
    norm: Callable[[], Tensor] | None = None
    found_inf: Callable[[], Tensor] | None = None
    after: Callable[[], tuple[ScaleState, Outcome]] | None = None
    vector: Tensor | None = None
    divisor: Tensor | None = None

    live: ClassVar[bool] = False
    loss_gates: ClassVar[bool] = True

    @property
    def arrived(self) -> bool:
        """Whether `seen` would return at once."""
        return self.copy is None or self.copy.arrived

    def seen(self) -> Seen:
        """Returns them as numpy scalars. Synchronizes with the device until they have arrived."""
        if self.found is None and self.copy is not None and self.read is not None:
            self.found = self.read(self.copy.read())
            self.copy = self.read = None
        return self.found  # type: ignore[return-value]


class RuleState(NamedTuple):
    """Where a rule is between two steps.

    Attributes:
        state: the state of its policy.
        amax_ratio: the last ratio of the largest magnitude to the norm.
        steps: how many steps it has followed.
    """

    state: ScaleState
    amax_ratio: Any
    steps: int


class Rule:
    """A policy and its present state, in host memory, whatever device the gradients are on.

    Where the facts of a step are on their way from a device, the rule catches up when its state is next asked for: at
    the next loss, for which the device has the optimizer's step and the forward pass to run meanwhile. Where the device
    runs the rule itself, it catches up with what has arrived, and waits only when it is asked for a number.

    Attributes:
        policy: the rule for the scale.
        reads: what the policy needs to be read of the gradients.
        multiplies: whether losses are multiplied and gradients divided at all.
        device: where the scale is kept for losses and gradients; None before the first loss.
        ahead: the packed state on the device, where that runs the rule, and the host may not know it yet; else None.
        no_kernel: why the device has no kernel for the rule, or nothing if it has one; None while that is not known.
        capturable: whether `ahead` stays in one place, so that a captured step goes on from what it left there. The
            host then knows nothing until it asks.
        followed: of the last step that it has followed, where it was before, what it has seen, and the state after.
    """

    def __init__(self, policy: Policy, device: torch.device | None = None, *, capturable: bool = False) -> None:
        self.device = device
        self.capturable = capturable
        self.ahead: Tensor | None = None
        self._live: tuple[Facts, Callable[[ScaleState], None]] | None = None  # the last step, if it may be captured
        self._scale: tuple[Any, Tensor] | None = None
        self._pending: deque[tuple[Facts, Callable[[ScaleState], None], bool, bool]] = deque()
        self.load(policy, policy.start())

    def __getstate__(self) -> dict[str, Any]:
        """Returns the contents of a copy: it has caught up."""
        now = self.catch_up()
        emptied = dict.fromkeys(("_scale", "_next", "ahead", "_live"))
        return self.__dict__ | emptied | {"_now": now, "_pending": deque()}

    def __setstate__(self, contents: dict[str, Any]) -> None:
        self.__dict__.update(contents)
        self.replace(self.policy)

    def load(self, policy: Policy, state: ScaleState, amax_ratio: float = UNKNOWN_RATIO) -> None:
        """Loads another policy and its state, given as numpy numbers."""
        self.replace(policy)
        self.go_back(RuleState(state, np.float32(amax_ratio), int(state.applied) + int(state.skipped)))

    def replace(self, policy: Policy) -> None:
        """Goes on with another policy from the present state, which it has to understand."""
        if self.capturable and self.ahead is not None and policy != self.policy:
            raise RuntimeError(
                "With `capturable=True` the policy cannot be replaced after the first step, as a captured step would "
                f"follow the old one. Received: {policy!r} in place of {self.policy!r}. Build another scaler."
            )
        self.policy, self._next = policy, rule_on_host(policy)
        self.reads, self.multiplies = Plan.of(policy), multiplies(policy)
        self.no_kernel: str | None = None

    @property
    def state(self) -> ScaleState:
        """The state before the next step. Synchronizes with the device where the rule has yet to catch up."""
        return self.catch_up().state

    @state.setter
    def state(self, state: ScaleState) -> None:
        self.go_back(self.catch_up()._replace(state=state))

    @property
    def steps(self) -> int:
        """How many steps the rule has followed, on the device or on the host. Never synchronizes."""
        return self._now.steps + len(self._pending)

    @property
    def latest(self) -> ScaleState:
        """The newest state that is known without synchronizing; where steps may be captured, the present one."""
        return self.catch_up(waits=self.capturable).state

    @property
    def scale(self) -> Tensor:
        """The scale of the next step, a 0-d float32 tensor that nobody writes to."""
        if self.ahead is None:
            return self.scale_of(self.state)
        with torch.inference_mode(False):  # as in `scale_of`
            scale = self.ahead[0].view(torch.float32)
            return scale.clone() if self.capturable else scale  # the step will write there

    def scale_of(self, state: ScaleState) -> Tensor:
        """Returns the scale of a state as a tensor on the device: the same one while it does not change."""
        if self._scale is None or self._scale[0] != state.scale or self._scale[1].device != self.device:
            # Not inside `inference_mode`, whose tensors autograd cannot keep for a backward pass.
            with torch.inference_mode(False):
                self._scale = state.scale, filled(float(state.scale), self.device or torch.device("cpu"))
        return self._scale[1]

    def go_back(self, progress: RuleState, ahead: Tensor | None = None) -> None:
        """Goes back to where the rule was, from where it has caught up: results keep the outcomes of their steps."""
        if self._pending:
            self.catch_up()
        self.followed: tuple[RuleState, Seen, ScaleState] | None = None
        self._now, before, self.ahead = progress, self.ahead, ahead
        if self.capturable and before is not None:
            self.ahead = before.copy_(self._packed())

    def _packed(self) -> Tensor:
        vector = Packed(self.policy).pack(self._now.state, START._replace(amax_ratio=self._now.amax_ratio))
        return torch.from_numpy(vector)

    def follow(
        self, facts: Facts, then: Callable[[ScaleState], None], *, estimates_amax: bool = False, measured: bool = True
    ) -> None:
        """Advances by one step: now if its facts are known, else when the state is next asked for.

        Args:
            facts: those of the step.
            then: called with the state after it.
            estimates_amax: whether the policy follows the largest magnitude where a norm is read at every step.
            measured: whether this step has measured it. It is estimated from the norm otherwise.
        """
        if facts.after is None:
            self.catch_up()
        if facts.live and self.ahead is not None and facts.vector is not None:
            self.ahead.copy_(facts.vector)
            self._live = facts, then
            return
        self.ahead = facts.vector
        self._pending.append((facts, then, estimates_amax, measured))
        if facts.found is not None:
            self.catch_up()

    def catch_up(self, *, waits: bool = True) -> RuleState:
        """Returns where the rule is, after the last step. Synchronizes if the host does not know its facts yet.

        Unless it `waits`: then it is where the rule is after the last step whose facts have arrived.
        """
        while self._pending and (waits or self._pending[0][0].arrived):
            facts, then, estimates, measured = self._pending[0]
            seen = facts.seen()  # first: if it is interrupted, nothing has been followed
            self._pending.popleft()
            state, ratio, steps = self._now
            with np.errstate(all="ignore"):
                if estimates and not measured:
                    seen = estimate_on_host(seen, ratio)
                if facts.after is not None:
                    state, ratio = facts.after()[0], facts.after()[1].amax_ratio
                else:
                    if estimates and measured:
                        ratio = ratio_on_host(seen, ratio)
                    state = self._next(state, seen)
                    if seen.finite and not seen.loss_finite and not facts.loss_gates:
                        state = on_host(counted_as_applied, self._now.state, state, seen)
                self.followed = self._now, seen, state
                self._now = RuleState(state, ratio, steps + 1)
            then(state)
        if waits and self._live is not None and self.ahead is not None:
            facts, then = self._live
            facts.seen()
            self._now = self.read(self.ahead)
            then(self._now.state)
        return self._now

    def uploaded(self, device: torch.device) -> Tensor | None:
        """Returns the packed state on a device, which follows the rule from now on; None if it does not fit.

        Synchronizes where the rule has yet to catch up.
        """
        if Packed(self.policy).holds(self.catch_up().state):
            self.ahead = self._packed().to(device, non_blocking=True)
        return self.ahead

    def read(self, ahead: Tensor) -> RuleState:
        """Returns a packed state as it is on the host. Synchronizes with the device."""
        state, outcome = Packed(self.policy).unpack(np.array(ahead.tolist(), np.int32))
        return RuleState(state, outcome.amax_ratio, int(state.applied) + int(state.skipped))

    def lowered(self, state: ScaleState) -> ScaleState:
        """Returns `state` backed off once, without hysteresis. Changes nothing."""
        return on_host(lambda state, seen, xp: backed_off(self.policy, state, seen, xp), state, OVERFLOW)
