"""The ranks that decide together, and the rounds in which they tell each other what they have seen."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradscale.engine.culprits import Culprit
from gradscale.engine.measurement import Measurement
from gradscale.policies.contract import Seen
from gradscale.torch.accumulation.window import Window
from gradscale.torch.ranks.culprits import culprits_of_all
from gradscale.torch.ranks.errors import RankFailed
from gradscale.torch.ranks.faults import Faults
from gradscale.torch.ranks.groups import ALONE, check_distinct, check_group
from gradscale.torch.ranks.missed import Missed
from gradscale.torch.ranks.norms import Norms, seen_by_all
from gradscale.torch.ranks.packet import FLAGS, Facts, Received, exchange, join_maximum, with_flags
from gradscale.torch.ranks.placements import Distinct, Placements, check_mesh
from gradscale.torch.ranks.store import leave_reason
from gradscale.torch.step.gradients import Gradients, parameters_of
from gradscale.torch.step.host_copy import in_host_memory

Optimizer = torch.optim.Optimizer


class Rounds:
    """The ranks that decide together, and what they tell each other: a few numbers of each, in one round for a step.

    Attributes:
        group: a process group; None is every rank once `torch.distributed` is initialized, `"alone"` only this one.
        missed: steps that were applied on some ranks and not on others.
        norms: what this rank sends for a norm over all ranks.
    """

    def __init__(self, modules: Sequence[nn.Module] = (), group: Any = None, distinct: Distinct = None) -> None:
        """Names the ranks.

        Args:
            modules: those trained, which tell how their parameters are spread.
            group: as the attribute.
            distinct: the group over which plain tensors are distinct, or a mapping of modules or parameters to such.
        """
        self.group = check_group(group)
        self.missed = Missed()
        self.norms = Norms(Placements(modules, check_distinct(distinct)))
        self._faults: Faults | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the contents of a copy: what one step has left for the next is not part of it."""
        return {**self.__dict__, "_faults": None}

    @property
    def ranks(self) -> int:
        """How many ranks decide together."""
        # Looked up at every step: `torch.distributed` may be initialized after the scaler is built.
        if self.group == ALONE or not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self.group)

    def check_shards(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises if ranks outside of the group hold shards of a parameter."""
        if self.group is not None:  # else they are all inside
            for mesh in {getattr(each, "device_mesh", None) for each in parameters_of(optimizers)} - {None}:
                check_mesh(mesh, self.group)

    def begin(self, window: Window | None = None) -> None:
        """Begins a step. Raises what the last one has found on an accelerator, where it could not be read at once.

        `window` is the one that is open.
        """
        self.missed.check_again(window)
        faults, self._faults = self._faults, None
        if faults is not None:
            self._raise_any(faults)

    def weights(self, gradients: Gradients) -> Sequence[float] | None:
        """Returns what the elements of each gradient count here, so that over all ranks each element counts once.

        None if all of them count the same.
        """
        return None if self.ranks == 1 else self.norms.weights(gradients, self.group)

    def send(self, facts: Facts, amax: Tensor | None, scale: Tensor) -> Received:
        """Returns what all ranks have seen, or raises what one of them has found. Every rank must call it.

        On an accelerator that is raised when the next step begins, and this one is skipped. `facts` need not have the
        scale, and whether there is an `amax`, the largest magnitude on this rank.
        """
        device, wide = scale.device, scale.double()
        known = replace(facts, scale=wide, scale_squared=wide.square(), sends_amax=float(amax is not None))
        received = exchange(known, amax, device, self.group)
        faults = Faults(received.facts, scale, self.group)
        if not in_host_memory(device):
            self.missed.raise_again()
            self._faults = faults
            self.missed.end_round()
            return received._replace(facts=replace(received.facts, bad=received.facts.bad + faults.any))
        if received.amax is None and received.facts.sends_amax:
            join_maximum(device, self.group)
        self.missed.raise_again()
        self._raise_any(faults)
        self.missed.end_round()
        return received

    def send_with_norm(
        self,
        facts: Facts,
        amax: Tensor | None,
        scale: Tensor,
        gradients: Gradients,
        measurement: Measurement,
        divisor: Tensor,
    ) -> tuple[Received, Seen]:
        """Returns what `send` does, and what all ranks have seen: with the norm of the gradients divided by `divisor`.

        `measurement` is that of the gradients of this rank, with their norms.
        """
        norm = cast(Tensor, measurement.norm) * (1.0 / divisor)
        squares = self.or_fail(
            lambda: self.norms.squares(gradients, measurement, norm, self.group, divisor), scale.device
        )
        known = replace(
            facts,
            spread=squares.spread,
            same=squares.same,
            same_squared=squares.same_squared,
            holders=squares.holders,
            asks_norm=1.0,
            smaller_meshes=self.norms.on_smaller_meshes(gradients, self.ranks),
        )
        received = self.send(known, amax, scale)
        self.norms.compare_meshes(gradients, measurement, received.facts, self.group)
        return received, seen_by_all(received, divisor)

    def norm(self, gradients: Gradients, measurement: Measurement, scale: Tensor) -> Tensor:
        """Returns the norm over the gradients of all ranks, which `scale` has not made. Every rank must call it.

        Does not synchronize with the device. Raises as `agree`.
        """
        norm = cast(Tensor, measurement.norm)
        if self.ranks == 1:
            return norm
        own = Facts(bad=~torch.isfinite(norm))
        _, seen = self.send_with_norm(own, None, scale, gradients, measurement, torch.ones_like(norm))
        return seen.norm

    def follow(self, scale: Tensor) -> Received:
        """Returns what other ranks have seen of a step that this one, which has no batches left, only follows."""
        device = scale.device
        facts = Facts(scale=scale, scale_squared=scale.double().square(), follows=1.0)
        received = exchange(facts, None, device, self.group)
        if received.facts.sends_amax:
            received = received._replace(amax=join_maximum(device, self.group))
        self._raise_any(Faults(received.facts, scale, self.group))
        return received

    def any_rank(self, flags: Tensor) -> list[bool]:
        """Returns which of `flags`, a vector of up to 3 bools, are set on any rank. Synchronizes with the device.

        Raises as `agree`, and if other ranks are in a step.
        """
        if self.ranks == 1:
            return flags.tolist()  # type: ignore[return-value]
        # In the form of a step's round: a rank that is in a step by now finds what is wrong, and so does this one.
        facts = exchange(with_flags(flags), None, flags.device, self.group).facts
        if facts.sends_amax:
            join_maximum(flags.device, self.group)
        self._raise_any(Faults(facts, torch.zeros_like(facts.scale), self.group))
        return [bool(getattr(facts, name)) for name in FLAGS[: len(flags)]]

    def culprits(self, own: Sequence[Culprit], device: torch.device) -> list[Culprit]:
        """Returns the culprits of all ranks, the same on each. Every rank must call it. Synchronizes."""
        return culprits_of_all(own, device, self.group)

    def fail(self, error: Exception, device: torch.device) -> None:
        """Tells the other ranks, in the round of a step, that this one cannot take part in it.

        They raise a `RankFailed` with the reason; this rank raises its `error`.
        """
        if not self.missed:  # else the first reason stays
            leave_reason(_text(error))
        received = exchange(self.own_failure(failed=True), None, device, self.group)
        if received.facts.sends_amax:
            join_maximum(device, self.group)
        faults = Faults(received.facts, torch.zeros((), device=device), self.group)
        if in_host_memory(device):
            with suppress(RankFailed):
                self._raise_any(faults)
        else:
            self._faults = faults

    def miss(self, error: BaseException) -> None:
        """Notes that this rank has failed in a step which others apply. They raise a `RankFailed` in the next round."""
        if self.ranks > 1:
            leave_reason(f"in a step that others have applied: {_text(error)}")
            self.missed.refuse()

    def or_fail(self, facts: Callable[[], Facts], device: torch.device) -> Facts:
        """Returns what this rank sends, or raises, and tells the other ranks that it cannot take part in the step."""
        try:
            return facts()
        except Exception as error:  # such as a parameter of which ranks outside of the group have shards
            self.fail(error, device)
            raise

    def own_failure(self, *, failed: bool) -> Facts:
        """Returns what this rank sends if it has `failed` in this step, or missed one before."""
        missed = bool(self.missed)
        rank = float(dist.get_rank()) if failed or missed else 0.0
        return Facts(failed=float(failed), failed_rank=rank, missed=float(missed))

    def _raise_any(self, faults: Faults) -> None:
        """Raises what a round has found, and notes it if no rank may go on after it."""
        try:
            faults.raise_any()
        except RankFailed as error:
            self.missed.note(error)
            raise


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
