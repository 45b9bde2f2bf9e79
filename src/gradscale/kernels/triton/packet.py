"""What ranks send each other, written and read on the device: two operators around an all-reduce, of a launch each.

The packet is that of `gradscale.torch.ranks.round`. On the CPU both operators are numpy's.
"""

import math
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscale.engine.measurement import LARGEST_NORM
from gradscale.engine.packed import BLOCK
from gradscale.kernels.triton.kernel import OPTIONS


class At(IntEnum):
    """The places of the numbers of a packet."""

    GRADIENTS = 0
    BAD = 1
    BAD_LOSS = 2
    SPREAD = 3
    SAME = 4
    SAME_SQUARED = 5
    HOLDERS = 6
    ABOVE = 7
    ELEMENTS = 8
    SCALE = 9
    SCALE_SQUARED = 10
    SENDS_AMAX = 11
    ASKS_NORM = 12
    BOUNDS = 13
    BOUNDS_SQUARED = 14
    FOLLOWS = 15


SHOWN = 6
"""Numbers that show a fault, as `Rounds.send` has them."""


@torch.library.custom_op("gradscale::write_packet", mutates_args=(), device_types="cpu")
def write_packet(
    scale: Tensor, numbers: Tensor, weights: Tensor, first: int, end: int, elements: float, flags: list[float]
) -> tuple[Tensor, Tensor]:
    """Returns what a rank sends, in float64, and its unscaled largest magnitude. Does not synchronize.

    Args:
        scale: what made the gradients, a 0-d float32.
        numbers: what was read, as in `Packed.read`: up to `first` norms, up to `end` largest magnitudes, then losses.
        weights: what the square of each norm counts: two rows, for gradients that are spread and for others.
        first: as said.
        end: as said.
        elements: of how many elements the last number is the share above an edge; 0 if it is none.
        flags: 1 or 0: whether the rank has gradients that are the same on every rank, and sends its magnitude; and the
            bounds that it clips by.
    """
    found, divisor = numbers.numpy(), np.float32(scale.item())
    with np.errstate(all="ignore"):
        losses, unscale = found[end : len(found) - (elements > 0)], np.float32(1) / divisor
        peak = np.abs(found[first:end]).max(initial=np.float32(0)) * unscale
        finite = bool(np.isfinite(found[:end]).all() and np.isfinite(peak))
        squares = np.square(found[:first].astype(np.float64) * unscale)
        spread, same = weights.numpy() @ squares if finite and first else (0.0, 0.0)
    sent = {
        At.GRADIENTS: 1.0,
        At.BAD: not finite,
        At.BAD_LOSS: not np.isfinite(losses).all(),
        At.SPREAD: spread,
        At.SAME: same,
        At.SAME_SQUARED: same * same,
        At.HOLDERS: flags[0] * finite if first else 0.0,
        At.ABOVE: float(found[-1]) * elements if elements else 0.0,
        At.ELEMENTS: elements,
        At.SCALE: float(divisor),
        At.SCALE_SQUARED: float(divisor) ** 2,
        At.SENDS_AMAX: flags[1],
        At.ASKS_NORM: first > 0,
        At.BOUNDS: float(np.float32(flags[2])),
        At.BOUNDS_SQUARED: float(np.float32(flags[2])) ** 2,
        At.FOLLOWS: 0.0,
    }
    packet = torch.tensor([float(sent[at]) for at in At], dtype=torch.float64)
    return packet, torch.tensor(float(peak) if finite else 0.0, dtype=torch.float32)


@torch.library.custom_op("gradscale::read_packet", mutates_args=(), device_types="cpu")
def read_packet(
    scale: Tensor,
    packet: Tensor,
    amax: Tensor,
    ranks: int,
    tolerances: list[float],
    asked: list[bool],
) -> Tensor:
    """Returns what all ranks have sent as the numbers of one step, and after them what shows a fault.

    A norm, a largest magnitude, a loss and a share, as many of them as `advance` reads, scaled. Does not synchronize.

    Args:
        scale: as in `write_packet`.
        packet: the sums over all ranks.
        amax: the largest magnitude over all ranks.
        ranks: how many there are.
        tolerances: relative differences of scales, and of squared norms, that are taken to be the same.
        asked: whether there is a norm, a largest magnitude, and a share.
    """
    sums, divisor = packet.tolist(), np.float32(scale.item())
    norm, peak, share = asked
    with np.errstate(all="ignore"):
        parted = differ(sums[At.SCALE], sums[At.SCALE_SQUARED], ranks, tolerances[0])
        distinct = differ(sums[At.SAME], sums[At.SAME_SQUARED], sums[At.HOLDERS], tolerances[1])
        clips = differ(sums[At.BOUNDS], sums[At.BOUNDS_SQUARED], ranks - sums[At.FOLLOWS], tolerances[0])
        total = np.float32(math.sqrt(sums[At.SPREAD] + sums[At.SAME] / max(sums[At.HOLDERS], 1.0))) * divisor
        finite = sums[At.BAD] + parted + distinct + clips == 0 and bool(total < LARGEST_NORM)
        found = [float(total)] if norm else []
        found += [float(np.float32(amax.item()) * divisor)] if peak else []
        found = found if finite else [math.inf] * len(found)
        found.append(0.0 if sums[At.BAD_LOSS] == 0 else math.inf)
        found += [sums[At.ABOVE] / max(sums[At.ELEMENTS], 1.0)] if share else []
    shown = [float(parted), float(distinct), sums[At.SENDS_AMAX], sums[At.ASKS_NORM], sums[At.FOLLOWS], clips]
    return torch.tensor([*found, *shown], dtype=torch.float32)


def differ(total: Any, squares: Any, count: Any, tolerance: float) -> Any:
    """Returns whether `count` numbers, whose sum and sum of squares are given, differ relative to their mean."""
    # Their variance, times the square of the count: 0 where all are equal.
    return count * squares - total * total > tolerance**2 * total * total


@write_packet.register_kernel("cuda")
def _(
    scale: Tensor, numbers: Tensor, weights: Tensor, first: int, end: int, elements: float, flags: list[float]
) -> tuple[Tensor, Tensor]:
    packet = torch.empty(len(At), dtype=torch.float64, device=numbers.device)
    amax = torch.empty((), dtype=torch.float32, device=numbers.device)
    last = numbers.numel() - (elements > 0)
    arguments = scale, numbers, weights, packet, amax, first, end, last, elements, *flags
    _kernels().write[(1,)](*arguments, BLOCK=BLOCK, **OPTIONS)
    return packet, amax


@read_packet.register_kernel("cuda")
def _(scale: Tensor, packet: Tensor, amax: Tensor, ranks: int, tolerances: list[float], asked: list[bool]) -> Tensor:
    norm, peak, share = asked
    found = torch.empty(norm + peak + 1 + share + SHOWN, dtype=torch.float32, device=packet.device)
    flags = {"NORM": norm, "PEAK": peak, "SHARE": share}
    _kernels().read[(1,)](scale, packet, amax, found, ranks, *tolerances, **flags, **OPTIONS)
    return found


@cache
def _kernels() -> Any:
    from gradscale.kernels.triton import packets

    return packets


@write_packet.register_fake
def _(
    scale: Tensor, numbers: Tensor, weights: Tensor, first: int, end: int, elements: float, flags: list[float]
) -> tuple[Tensor, Tensor]:
    return numbers.new_empty(len(At), dtype=torch.float64), numbers.new_empty(())


@read_packet.register_fake
def _(scale: Tensor, packet: Tensor, amax: Tensor, ranks: int, tolerances: list[float], asked: list[bool]) -> Tensor:
    return amax.new_empty(sum(asked) + 1 + SHOWN)
