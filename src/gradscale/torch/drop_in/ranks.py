"""The ranks that `GradScaler` agrees with: whether gradients are finite, and how large they are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.ranks.packet import Facts
from gradscale.torch.step.agree import Agreement
from gradscale.torch.step.gradients import parameters_of
from gradscale.torch.step.measure import any_overflow

Optimizer = torch.optim.Optimizer
Flags = dict[torch.device, Tensor]
"""Per device, whether a gradient was not finite: 0 or 1, as torch's scaler keeps it."""


class Ranks:
    """The ranks that decide together on the gradients of an optimizer.

    With a process group, or `always`, those of the group at every step. Else every rank if a parameter is a DTensor,
    whatever its mesh, and only this one if all are plain: under DDP the reduced gradients are the same on all.
    """

    def __init__(self, group: Any, *, always: bool = False) -> None:
        self._agreement = Agreement(group=group, always=True)
        self._always = always or group is not None

    @property
    def group(self) -> Any:
        """The process group; None by default, `"alone"` for this process."""
        return self._agreement.group

    @property
    def always(self) -> bool:
        """Whether there are other ranks that decide on all gradients, too."""
        return self._always and self._agreement.ranks > 1

    def share(self, optimizer: Optimizer) -> bool:
        """Returns whether other ranks decide on the gradients of `optimizer`, too."""
        # By the parameters: a rank may have none of the gradients.
        return self._agreement.ranks > 1 and (
            self._always or any(hasattr(kind, "to_local") for kind in set(map(type, parameters_of([optimizer]))))
        )

    def agree(self, optimizer: Optimizer, state: dict[str, Any], scale: Tensor, find: Callable[[], Flags]) -> Flags:
        """Returns the flags that `find` returns, and that are the same on all ranks; so are the sizes in `state` then.

        One round (`gradscale.torch.ranks.packet`). If `find` raises, so do all ranks. Does not synchronize with the
        device.

        Raises:
            RankFailed: another rank has raised.
            ScaleDesync: the ranks have different scales.
        """
        if not self.share(optimizer):
            return find()
        self._agreement.begin()
        try:
            flags = find()
        except Exception as error:
            self._agreement.fail(error, [optimizer], scale.device)
            raise
        overflow = any_overflow(flags.values(), scale.device)
        overflow = self._send_sizes(state, overflow, scale) if "sizes" in state else self._send(overflow, scale)
        # Also on a rank without gradients, which would count as one that was not checked.
        return {device: overflow.to(device, torch.float32) for device in flags or (scale.device,)}

    def _send(self, overflow: Tensor, scale: Tensor) -> Tensor:
        """Returns whether a gradient of any rank is not finite."""
        facts: Any = self._agreement.send(Facts(bad=overflow), None, scale).facts
        return facts.bad > 0

    def _send_sizes(self, state: dict[str, Any], overflow: Tensor, scale: Tensor) -> Tensor:
        """Returns the same, and makes the sizes in `state` those of all ranks."""
        sizes, elements = state["sizes"]
        share = 0.0 if sizes.upper_share is None else torch.where(overflow, 0.0, sizes.upper_share)
        own = Facts(bad=overflow, above=share * elements, elements=float(elements))
        received = self._agreement.send(own, torch.where(overflow, 0.0, sizes.amax), scale)
        facts: Any = received.facts
        sizes = sizes._replace(amax=received.amax)
        if sizes.upper_share is not None:
            sizes = sizes._replace(upper_share=(facts.above / facts.elements.clamp(min=1)).to(scale))
        state["sizes"] = sizes, facts.elements.to(scale)
        return facts.bad > 0
