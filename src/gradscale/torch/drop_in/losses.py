"""Whether the losses of a step were finite, which torch's scaler does not know: for policies, results, stuck check."""

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor

from gradscale.torch.local import local
from gradscale.torch.step.host_copy import moved


class Losses:
    """The sum of the losses that were scaled since the last `update`, per device."""

    # The losses themselves and no flags: nothing is computed for a single loss until a step needs to know.

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: dict[torch.device, Tensor] = {}

    def clear(self) -> None:
        """Forgets the losses of a step that is done."""
        self._sums.clear()

    def kept(self) -> dict[torch.device, Tensor]:
        """Returns the sums, for `resume`."""
        return dict(self._sums)

    def resume(self, kept: Mapping[torch.device, Tensor]) -> None:
        """Goes on from the sums that `kept` returned."""
        self._sums = dict(kept)

    def add(self, loss: Tensor) -> None:
        """Adds a loss, in float32 or wider, without its graph. Does not synchronize with the device."""
        held = local(loss.detach())
        total = held.sum() if held.ndim else held
        before = self._sums.get(loss.device)
        self._sums[loss.device] = total if before is None else before + total

    def finite(self, device: torch.device) -> Tensor:
        """Returns whether all of them were finite, as a 0-d bool on `device`. Does not synchronize."""
        # Times 0: NaN if the sum is inf or NaN, else 0. `isfinite` takes twice as many kernels.
        flags = [moved(total * 0 == 0, device) for total in self._sums.values()]
        return reduce(torch.logical_and, flags) if flags else torch.ones((), dtype=torch.bool, device=device)
