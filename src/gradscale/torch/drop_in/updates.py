"""State of a drop-in: what is noted of each optimizer until `update` makes one step of it, and torch's two tensors."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gradscale.policies.contract import Seen
from gradscale.torch.host import Facts, HostCopy
from gradscale.torch.step.measure import merged_flag
from gradscale.torch.window.window import Window

States = dict[int, dict[str, Any]]
"""What is noted of each optimizer, by its id.

As in torch's scaler, its `stage` and `found_inf_per_device`, a flag for each device; and `noted`, once it was checked.
"""

WRITTEN = -1
"""In place of the version of flags: that of none."""


@dataclass(eq=False)
class Noted:
    """What was seen of the gradients of one optimizer.

    Attributes:
        optimizer: the optimizer; None of one that other code has checked.
        facts: what was seen of them before they were unscaled, and perhaps edited.
        checks: all facts of them, or those of flags that other code has made or written to since: where one is not
            finite, the step is not applied.
        normed: those with the norm, perhaps of edited gradients; None if it was not read.
        norm: whether `facts` have it.
        amax: whether `facts` have the largest magnitude.
        elements: how many there are, where a share of them was counted.
        loss_counts: whether this rank knows every loss that made them: not where other ranks have their own.
        groups: how many groups had theirs unscaled, 0 if these were cleared since; None if none had.
        flags: what was written to `found_inf_per_device`.
        version: how often they were written to when they were last looked at; None of new ones, and `WRITTEN` of those
            that other code has been given.
        result: the result of the step, as far as it is known; None where other code has checked them.
    """

    optimizer: torch.optim.Optimizer | None
    facts: Facts
    checks: list[Facts] = field(default_factory=list)
    normed: Facts | None = None
    norm: bool = False
    amax: bool = False
    elements: float = 0.0
    loss_counts: bool = True
    groups: int | None = None
    flags: Mapping[Any, Tensor] | None = None
    version: int | None = None
    result: Any = None


@dataclass(eq=False)
class DropInWindow(Window):
    """A window whose optimizers are checked and stepped one by one, and which `update` closes, from its start.

    Attributes:
        noted: what is noted of each optimizer.
        divided: the optimizers whose gradients are divided.
        updated: whether `update` has closed it.
    """

    noted: States = field(default_factory=dict)
    divided: list[torch.optim.Optimizer] = field(default_factory=list)
    updated: bool = False

    widened: ClassVar[tuple[torch.dtype, ...]] = (torch.float16,)


@dataclass(eq=False)
class Merged(Facts):
    """The facts of several optimizers as those of one step.

    Attributes:
        noted: what was noted of each optimizer.
        ratio: the last one of the largest magnitude to the norm, for those whose norm alone was read.
    """

    noted: Sequence[Noted] = ()
    ratio: Any = 1.0

    loss_gates: ClassVar[bool] = False

    @property
    def arrived(self) -> bool:
        """Whether `seen` would return at once."""
        return all(check.arrived for each in self.noted for check in each.checks)

    def seen(self) -> Seen:
        """Returns what was seen of all of them."""
        if self.found is None:
            found = [(each, each.facts.seen()) for each in self.noted]
            finite = all(check.seen().finite for each in self.noted for check in each.checks)
            norms = [float(seen.norm) for each, seen in found if each.norm]
            amaxes = [seen.amax if each.amax or not each.norm else seen.norm * self.ratio for each, seen in found]
            elements = sum(each.elements for each in self.noted)
            shares = sum(float(seen.upper_share) * each.elements for each, seen in found)
            self.found = Seen(
                finite=np.bool_(finite),
                loss_finite=np.bool_(all(seen.loss_finite for each, seen in found if each.loss_counts)),
                amax=max(amaxes, default=np.float32(0)) if finite else np.float32(np.inf),
                norm=np.float32(math.hypot(*norms) if finite else np.inf),
                upper_share=np.float32(shares / elements if elements else 0.0),
            )
        return self.found


def noted_in(state: dict[str, Any]) -> Noted | None:
    """Returns what is noted in the state of an optimizer, with flags that other code has made or written to."""
    if not (flags := state["found_inf_per_device"]):
        return None
    noted: Noted = state.setdefault("noted", Noted(None, Facts(Seen())))
    version = sum(0 if flag.is_inference() else flag._version for flag in flags.values())
    if flags is not noted.flags or noted.version not in (None, version):
        # As 1 or 0 on the device: a fused kernel skips only for exactly 1.
        flags = {device: (flag != 0).float().reshape(()) for device, flag in flags.items()}
        noted.checks[:] = [facts_of(flags)]
        state["found_inf_per_device"], version = flags, 0
    noted.flags, noted.version = flags, version
    return noted


def facts_of(flags: Mapping[Any, Tensor]) -> Facts:
    """Returns the facts that flags show, 1 each where a gradient was not finite."""
    found = list(flags.values())
    vector = merged_flag(found, found[0].device).reshape(1)
    facts = Facts(copy=HostCopy(vector), read=lambda numbers: Seen(finite=np.bool_(not numbers[0])))
    if facts.arrived:
        facts.seen()
    return facts


VIEWS: Mapping[str, Callable[[float], Any]] = {"scale": np.float32, "clean_steps": np.int32}
"""The fields of a state that torch's scaler keeps in tensors, and their types."""


@dataclass(eq=False)
class View:
    """The scale or the growth tracker, as torch's scaler keeps them: a view of the rule's state, in host memory.

    What the state has is written to the tensor only when somebody looks at it. What others have written to it, which
    its version shows, is taken over before the state is used.

    Attributes:
        tensor: the tensor; None before the first loss.
        number: what it had when it was last written or read here; None for a tensor of other code.
        version: its version then.
    """

    tensor: Tensor | None = None
    number: float | None = None
    version: int = 0


def view_of(name: str) -> property:
    """Returns the attribute of a scaler that shows one field of the state."""

    def get(scaler: Any) -> Tensor | None:
        view: View = scaler._views[name]
        if view.tensor is not None and (number := float(getattr(scaler._state(), name))) != view.number:
            view.tensor.fill_(number)
            view.number, view.version = number, view.tensor._version
        return view.tensor

    def put(scaler: Any, tensor: Tensor | None) -> None:
        scaler._views[name] = View(tensor)

    return property(get, put)
