"""The ranks that `GradScaler` agrees with: whether gradients are finite, and how large they are."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gradscale.engine.measurement import Measurement
from gradscale.torch.drop_in.losses import Losses
from gradscale.torch.ranks.packet import Facts, Received
from gradscale.torch.ranks.rounds import Rounds
from gradscale.torch.step.gradients import Gradients, parameters_of
from gradscale.torch.step.measure import any_overflow

Optimizer = torch.optim.Optimizer
Flags = dict[torch.device, Tensor]
"""Per device, whether a gradient was not finite: 0 or 1, as torch's scaler keeps it."""


class ScaledNorm(NamedTuple):
    """The norm of an optimizer's gradients on this rank, before they are unscaled.

    Attributes:
        gradients: the gradients.
        measured: their norms.
        divisor: what they are to be divided by.
    """

    gradients: Gradients
    measured: Measurement
    divisor: Tensor


class Ranks:
    """The ranks that decide together on the gradients of an optimizer.

    With a process group, or `always`, those of the group at every step. Else every rank if a parameter is a DTensor,
    whatever its mesh, and only this one if all are plain: under DDP the reduced gradients are the same on all.
    """

    def __init__(self, group: Any, *, always: bool = False) -> None:
        self._rounds = Rounds(group=group)
        self._always = always or group is not None

    @property
    def group(self) -> Any:
        """The process group; None by default, `"alone"` for this process."""
        return self._rounds.group

    @property
    def always(self) -> bool:
        """Whether there are other ranks that decide on all gradients, too."""
        return self._always and self._rounds.ranks > 1

    def share(self, optimizer: Optimizer) -> bool:
        """Returns whether other ranks decide on the gradients of `optimizer`, too."""
        # By the parameters: a rank may have none of the gradients.
        return self._rounds.ranks > 1 and (
            self._always or any(hasattr(kind, "to_local") for kind in set(map(type, parameters_of([optimizer]))))
        )

    def loss_finite(self, states: Iterable[dict[str, Any]], losses: Losses, device: torch.device) -> Tensor:
        """Returns whether every loss of a step was finite, the same on all ranks. Does not synchronize.

        True where other ranks have losses of their own and `agree` has sent no round: as under DDP, where each rank
        knows the gradients of all, and its own loss only.
        """
        told = [state["loss_finite"] for state in states if "loss_finite" in state]
        if told:
            return reduce(torch.logical_and, told)
        return (losses if self._rounds.ranks == 1 else Losses()).finite(device)

    def agree(
        self, optimizer: Optimizer, state: dict[str, Any], losses: Losses, scale: Tensor, find: Callable[[], Flags]
    ) -> Flags:
        """Returns the flags that `find` returns, and that are the same on all ranks; so are sizes and norm in `state`.

        So is whether the `losses` were finite, which is noted there after a round.

        One round (`gradscale.torch.ranks.packet`). If `find` raises, so do all ranks. Does not synchronize with the
        device.

        Raises:
            RankFailed: another rank has raised.
            ScaleDesync: the ranks have different scales.
            ValueError: ranks that do not decide with this one hold shards of a parameter.
        """
        if not self.share(optimizer):
            self._rounds.check_shards([optimizer])
            return find()
        self._rounds.begin()
        try:
            self._rounds.check_shards([optimizer])
            flags = find()
        except Exception as error:
            self._rounds.fail(error, scale.device)
            raise
        overflow = any_overflow(flags.values(), scale.device)
        overflow = self._send(state, Facts(bad=overflow, bad_loss=~losses.finite(scale.device)), scale)
        # Also on a rank without gradients, which would count as one that was not checked.
        return {device: overflow.to(device, torch.float32) for device in flags or (scale.device,)}

    def norm(self, optimizer: Optimizer, gradients: Gradients, measured: Measurement, device: torch.device) -> Tensor:
        """Returns the norm over all ranks, of gradients that need no scale. Does not synchronize with the device."""
        if self.share(optimizer):
            return self._rounds.norm(gradients, measured, torch.ones((), device=device))
        return cast(Tensor, measured.norm)

    def _send(self, state: dict[str, Any], own: Facts, scale: Tensor) -> Tensor:
        """Returns whether a gradient of any rank is not finite, and makes what is in `state` that of all."""
        overflow, amax = own.bad, None
        if "sizes" in state:
            sizes, elements = state["sizes"]
            share = 0.0 if sizes.upper_share is None else torch.where(overflow, 0.0, sizes.upper_share)
            own = replace(own, above=share * elements, elements=float(elements))
            amax = None if sizes.amax is None else torch.where(overflow, 0.0, sizes.amax)
        if "norm" in state:
            norm: ScaledNorm = state["norm"]
            received, seen = self._rounds.send_with_norm(own, amax, scale, *norm)
            state["grad_norm"], overflow = seen.norm, ~seen.finite
            norm_of_all = seen.norm * norm.divisor
        else:
            norm_of_all, received = None, self._rounds.send(own, amax, scale)
            overflow = received.facts.bad > 0
        state["loss_finite"] = received.facts.bad_loss == 0
        if "sizes" in state:
            state["sizes"] = _of_all(state["sizes"][0], received, norm_of_all, scale)
        return overflow


def _of_all(sizes: Measurement, received: Received, norm: Tensor | None, scale: Tensor) -> tuple[Measurement, Tensor]:
    """Returns the sizes of all ranks, and the number of their elements."""
    facts: Any = received.facts
    sizes = sizes._replace(amax=received.amax, norm=norm)
    if sizes.upper_share is not None:
        sizes = sizes._replace(upper_share=(facts.above / facts.elements.clamp(min=1)).to(scale))
    return sizes, facts.elements.to(scale)
