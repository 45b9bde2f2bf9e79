"""The ranks that decide together, and the round of a step: the few numbers that every rank sends, summed over all."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradscale.engine import result as engine
from gradscale.engine.culprits import Culprit
from gradscale.engine.measurement import LARGEST_NORM, Measurement
from gradscale.kernels.triton.packet import SHOWN, differ, read_packet, write_packet
from gradscale.policies.contract import Seen
from gradscale.torch import host
from gradscale.torch.gradients import Gradients, count_elements, parameters_of
from gradscale.torch.host import HostCopy
from gradscale.torch.ranks.groups import ALONE, check_distinct, check_group
from gradscale.torch.ranks.placements import Placements

Optimizer = torch.optim.Optimizer
Number = Any  # a 0-d tensor, or a float before it is sent

SAME_SCALE = 1e-6
"""Relative difference of scales that are taken to be the same: sums of their squares are rounded."""

SAME_GRADIENTS = 1e-4
"""Relative difference of squared norms that are taken to be the same: ranks may sum them in another order."""

MOST_CULPRITS = 100
"""How many are named."""


class ScaleDesync(engine.ScaleDesync):
    """Raised on every rank at once when their scales differ. The step was applied on none of them.

    Attributes:
        scales: the scale of every rank.
    """

    def __init__(self, scales: Mapping[int, float]) -> None:
        self.scales = dict(scales)
        ranks: dict[float, list[str]] = {}
        for rank, scale in self.scales.items():
            ranks.setdefault(scale, []).append(str(rank))
        listed = "; ".join(
            f"{scale:g} on rank {', '.join(held[:8])}" + (f" and {len(held) - 8} more" if len(held) > 8 else "")
            for scale, held in ranks.items()
        )
        super().__init__(
            f"Ranks that decide together must have the same scale. Received: {listed}. Load the state of the scaler on "
            'every rank, or build it with `group="alone"` where ranks train separate models.'
        )

    def __reduce__(self) -> tuple[type["ScaleDesync"], tuple[Mapping[int, float]]]:
        """Returns how a pickle makes it again: multiprocessing sends errors to the parent process."""
        return ScaleDesync, (self.scales,)


class Packet(NamedTuple):
    """What a rank sends, and, summed, what all of them receive. Each is a number or a 0-d tensor."""

    gradients: Number = 0.0  # 1 if the rank has any
    bad: Number = 0.0  # 1 if a gradient is not finite
    bad_loss: Number = 0.0  # 1 if a loss is not finite
    spread: Number = 0.0  # squares of the gradients that are spread over ranks, summed, each divided by its copies
    same: Number = 0.0  # squares of the gradients that are the same on every rank, summed
    same_squared: Number = 0.0  # the square of `same`, which shows whether they are
    holders: Number = 0.0  # 1 if the rank has gradients of that kind
    above: Number = 0.0  # how many elements are above the edge that a policy watches
    elements: Number = 0.0  # of how many
    scale: Number = 0.0
    scale_squared: Number = 0.0  # which shows whether all ranks have the same
    sends_amax: Number = 0.0  # 1 if the rank sends its largest magnitude, too
    asks_norm: Number = 0.0  # 1 if the rank has read a norm
    bounds: Number = 0.0  # `clip_norm` and `clip_value`, added up
    bounds_squared: Number = 0.0  # which shows whether all ranks have the same
    follows: Number = 0.0  # 1 if the rank has no batches left, and only follows the others


class Received(NamedTuple):
    """What a rank knows after the round, the same on every rank."""

    packet: Packet  # the sums over all ranks, 0-d tensors
    amax: Tensor | None  # the largest magnitude on any of them; None where this rank has not sent one

    def seen(self, divisor: Tensor) -> Seen:
        """Returns what all ranks have seen of gradients that `divisor` divides, as tensors."""
        packet, unknown = self.packet, torch.zeros_like(divisor)
        # Gradients that are the same on every rank count once.
        norm = (packet.spread + packet.same / packet.holders.clamp(min=1)).sqrt().float()
        # Squares overflow before the gradients do, and nothing can be clipped by an infinite norm.
        finite = (packet.bad == 0) & (norm * divisor < LARGEST_NORM)
        return Seen(
            finite=finite,
            loss_finite=packet.bad_loss == 0,
            amax=torch.where(finite, unknown if self.amax is None else self.amax, torch.inf),
            norm=torch.where(finite, norm, torch.inf),
            upper_share=(packet.above / packet.elements.clamp(min=1)).float(),
        )


class Rounds:
    """The ranks that decide together, and what they send each other: a few numbers of each, in one round for a step.

    A rank that raises before a round does not come to it. The others wait there, as in any collective, until its
    process ends or for the timeout of the process group.

    Attributes:
        group: a process group; None is every rank once `torch.distributed` is initialized, `"alone"` only this one.
    """

    def __init__(self, modules: Sequence[nn.Module] = (), group: Any = None, distinct: Any = None) -> None:
        """Names the ranks. `modules` show how their parameters are spread, unless `distinct` names a group of them."""
        self.group = check_group(group)
        self._placements = Placements(modules, check_distinct(distinct))
        self._found: tuple[HostCopy, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the contents of a copy: what one step has left for the next is not part of it."""
        return {**self.__dict__, "_found": None}

    @property
    def ranks(self) -> int:
        """How many ranks decide together."""
        # Looked up at every step: `torch.distributed` may be initialized after the scaler is built.
        if self.group == ALONE or not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self.group)

    def check_shards(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises if ranks outside of the group hold shards of a parameter: they would decide on these by themselves."""
        if self.group is None:  # they are all inside
            return
        meshes: set[Any] = {getattr(each, "device_mesh", None) for each in parameters_of(optimizers)} - {None}
        for mesh in meshes:
            inside = {dist.get_rank()} if self.group == ALONE else set(dist.get_process_group_ranks(self.group))
            missing = sorted(set(mesh.mesh.flatten().tolist()) - inside)
            if missing:
                raise ValueError(
                    "The ranks that decide together must be all that hold shards of a parameter. Received: a group of "
                    f"ranks {sorted(inside)}, and a parameter that is also on ranks {missing}. Pass a larger `group`, "
                    "or leave it out for every rank."
                )

    def begin(self) -> None:
        """Begins a step. Raises what the last one has found on an accelerator, where it could not be read at once."""
        found, self._found = self._found, None
        if found is not None:
            self._raise_faults(*found)

    def weights(self, gradients: Gradients) -> Sequence[float] | None:
        """Returns what the elements of each gradient count here, so that over all ranks each element counts once.

        None if all of them count the same.
        """
        return None if self.ranks == 1 else self._placements.weights(gradients, self.ranks)

    def send(self, packet: Packet, amax: Tensor | None, scale: Tensor, *, waits: bool = False) -> Received:
        """Returns what all ranks have seen, or raises what the sums show. Every rank must call it.

        One round of small all-reduces: a sum, and beside it a maximum where `amax`, the largest magnitude on this rank,
        is given, both on their way at once. `packet` need not have the scale, and whether there is an `amax`.

        On an accelerator it does not synchronize: what the sums show is raised when the next step begins, and this one
        is skipped, unless it `waits`.
        """
        device, wide = scale.device, scale.double()
        known = packet._replace(scale=wide, scale_squared=wide.square(), sends_amax=float(amax is not None))
        # In float64 a sum of equal numbers is exact, and no square overflows.
        packed = torch.stack([_wide(number, device) for number in known])
        works = [dist.all_reduce(packed, dist.ReduceOp.SUM, group=self.group, async_op=True)]
        if (largest := None if amax is None else amax.detach().clone()) is not None:
            works.append(dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group, async_op=True))
        for work in works:
            work.wait()  # type: ignore[union-attr]
        packet = Packet(*packed.unbind())
        out_of_sync = differ(packet.scale, packet.scale_squared, self.ranks, SAME_SCALE)
        distinct = differ(packet.same, packet.same_squared, packet.holders, SAME_GRADIENTS)
        clips = differ(packet.bounds, packet.bounds_squared, self.ranks - packet.follows, SAME_SCALE)
        shown = out_of_sync, distinct, packet.sends_amax, packet.asks_norm, packet.follows, clips
        found = HostCopy(torch.stack([number.float() for number in shown]))
        if not (waits or host.in_host_memory(device)):
            self._found = found, scale
            return Received(packet._replace(bad=packet.bad + out_of_sync + distinct + clips), largest)
        if largest is None and packet.sends_amax:
            # This rank follows, or its arguments differ: the others do not wait for it, and send their maximum.
            largest = torch.zeros((), device=device)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        self._raise_faults(found, scale)
        return Received(packet, largest)

    def send_from_device(
        self,
        gradients: Gradients,
        numbers: Tensor,
        scale: Tensor,
        first: int,
        end: int,
        *,
        share: bool,
        amax: bool,
        bounds: float,
    ) -> Tensor:
        """Returns what `send` does as the numbers of one step, as `advance` reads them. Every rank must call it.

        The packet is written and read by a kernel each. Does not synchronize: faults are raised when the next step
        begins. Arguments are as those of `write_packet`; `share` is whether the last number is one, and `amax` whether
        the largest magnitude is sent; `bounds` is as in the packet.
        """
        rows, holder = self._placements.rows(gradients, self.ranks, scale.device)
        elements = count_elements(gradients.values, self.weights(gradients)) if share else 0.0
        packet, largest = write_packet(scale, numbers, rows, first, end, elements, [holder, float(amax), bounds])
        works = [dist.all_reduce(packet, dist.ReduceOp.SUM, group=self.group, async_op=True)]
        if amax:
            works.append(dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group, async_op=True))
        for work in works:
            work.wait()  # type: ignore[union-attr]
        asked, same = [first > 0, end > first, share], [SAME_SCALE, SAME_GRADIENTS]
        found = read_packet(scale, packet, largest, self.ranks, same, asked)
        self._found = HostCopy(found[-SHOWN:]), scale
        return found[:-SHOWN]

    def _raise_faults(self, found: HostCopy, scale: Tensor) -> None:
        """Raises the first fault that a round shows, on all ranks. Waits for its numbers, not for work queued since."""
        out_of_sync, distinct, sent_amax, asked_norm, follow, clips = map(round, found.read())
        ranks = dist.get_world_size(self.group)
        if out_of_sync:
            scales: list[Any] = [None] * ranks
            dist.all_gather_object(scales, (dist.get_rank(), float(scale)), group=self.group)
            raise ScaleDesync(dict(scales))
        if distinct:
            raise RuntimeError(
                "A norm over all gradients counts those once that are the same on every rank. Plain tensors, and "
                "meshes of fewer ranks, are taken to be. Received: plain gradients that differ between ranks. "
                "Name the ranks over which they are distinct, such as the stages of a pipeline: "
                "`LossScaler(model, distinct=group)`. Gradients of data-parallel ranks must be reduced before `step`, "
                'and ranks that train separate models take `LossScaler(model, group="alone")`.'
            )
        for what, asked in (("a largest magnitude", sent_amax), ("`clip_norm` or `norm`", asked_norm)):
            if 0 < asked < ranks - follow:
                raise RuntimeError(
                    f"All ranks must call `step` with the same arguments and the same policy. Received: {what} on "
                    f"{asked} of {ranks - follow} ranks. Pass the same everywhere."
                )
        if clips:
            raise RuntimeError(
                "All ranks must call `step` with the same arguments. Received: different values of `clip_norm` or "
                "`clip_value`. Pass the same everywhere."
            )

    def send_with_norm(
        self,
        packet: Packet,
        amax: Tensor | None,
        scale: Tensor,
        gradients: Gradients,
        measurement: Measurement,
        divisor: Tensor,
    ) -> Received:
        """Returns what `send` does, with the norm of the gradients divided by `divisor`.

        `measurement` is that of the gradients of this rank, with their norms.
        """
        spread, same, holders = self._placements.squares(gradients, measurement, self.ranks, divisor)
        sums = packet._replace(spread=spread, same=same, same_squared=same.square(), holders=holders, asks_norm=1.0)
        return self.send(sums, amax, scale)

    def norm(self, gradients: Gradients, measurement: Measurement, scale: Tensor) -> Tensor:
        """Returns the norm over the gradients of all ranks, which `scale` has not made. Every rank must call it.

        Does not synchronize with the device. Raises as `send`.
        """
        self.check_shards(gradients.optimizers)
        norm = cast(Tensor, measurement.norm)
        if self.ranks == 1:
            return norm
        own, one = Packet(bad=~torch.isfinite(norm)), torch.ones_like(norm)
        return self.send_with_norm(own, None, scale, gradients, measurement, one).seen(one).norm

    def follow(self, scale: Tensor) -> Received:
        """Returns what other ranks have seen of a step that this one, which has no batches left, only follows."""
        return self.send(Packet(follows=1.0), None, scale, waits=True)

    def any_rank(self, flags: Tensor) -> list[bool]:
        """Returns which of `flags`, a vector of bools, are set on any rank. Synchronizes with the device."""
        if self.ranks == 1:
            return flags.tolist()  # type: ignore[return-value]
        found = flags.int()
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found.bool().tolist()  # type: ignore[return-value]

    def culprits(self, own: Sequence[Culprit], device: torch.device) -> list[Culprit]:
        """Returns the culprits of all ranks, the same on each, of which there may be `MOST_CULPRITS`. Synchronizes.

        Every rank must call it. One rank after the other sends the names that were not sent before, the lowest first:
        number and size of the collectives depend on the names, not on the ranks. The kind is the worst that any rank
        has; the count is that of the rank which has most, since others may hold the same elements.
        """
        held, rank = {each.name: each for each in own}, dist.get_rank()
        names: dict[str, None] = {}
        nobody = 2**62
        while len(names) < MOST_CULPRITS:
            unsent = [name for name in held if name not in names][: MOST_CULPRITS - len(names)]
            text = json.dumps(unsent).encode()
            # The rank above, the length of its text below: the lowest of these numbers is that of the lowest rank.
            first = host.filled((rank << 32) + len(text) if unsent else nobody, device, torch.int64)
            dist.all_reduce(first, dist.ReduceOp.MIN, group=self.group)
            if (lowest := int(first)) == nobody:
                break
            source, length = lowest >> 32, lowest & 0xFFFFFFFF
            packed = torch.tensor(list(text) if source == rank else [0] * length, dtype=torch.uint8, device=device)
            dist.broadcast(packed, source, group=self.group)
            names |= dict.fromkeys(json.loads(bytes(packed.tolist())))
        if not names:
            return []
        here = [held.get(name) for name in names]
        kinds = [each is not None and each.kind == "nan" for each in here]
        counts = [0 if each is None or each.count is None else each.count for each in here]
        most = torch.tensor([kinds, counts], dtype=torch.int64, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return [
            Culprit(name, "nan" if nan else "inf", count or None)
            for name, nan, count in zip(names, *most.tolist(), strict=True)
        ]


def _wide(number: Number, device: torch.device) -> Tensor:
    return number.double() if isinstance(number, Tensor) else host.filled(number, device, torch.float64)
