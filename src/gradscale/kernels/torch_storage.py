"""The storages of master weights: what is kept beside 16-bit weights, how float32 values are made of both, and back."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

Storage = Literal["fp32", "remainder", "kahan", "stochastic"]
Tensors = Sequence[Tensor]

TIE = 1 << 15
"""The only remainder that an int16 cannot hold: of a value midway between two weights. From the other one, it fits."""

SMALLEST = (127 - 16) << 23
"""The bits of 2**-16 in float32. Smaller FP16 weights use its unit, which bounds their error by 2**-41."""

SUBNORMAL_STEP = 2.0**-24
"""The distance between subnormal FP16 numbers, the only ones whose remainder can be `TIE`: a normal FP16 number has
13 bits less than float32, so that its remainder is at most 2**13 in units of half a float32 step."""

ROUNDS = ((0x9E3779B97F4A7C15 - 2**64, 30), (0xBF58476D1CE4E5B9 - 2**64, 27), (0x94D049BB133111EB - 2**64, 31))
"""Multipliers, as int64, and shifts of SplitMix64 (Steele, Lea and Flood, 2014). The first multiplier is 2**64 over
the golden ratio: its multiples are spread evenly."""


class MasterStorage:
    """Computes float32 values from 16-bit weights and what is stored beside them, and writes them back.

    All are plain tensors: of a distributed parameter, what this rank holds.

    Attributes:
        stored_bytes: bytes stored beside each element of a weight.
        stored_dtype: the dtype of that; None if it is the weight's own.
        stores_values: whether the float32 values themselves are stored, and not something to compute them from.
    """

    stored_bytes: ClassVar[int]
    stored_dtype: ClassVar[torch.dtype | None] = None
    stores_values: ClassVar[bool] = False

    def store(self, weight: Tensor) -> Tensor:
        """Returns what to store beside a weight whose value is exact. By default zeros: nothing is lost yet."""
        return torch.zeros_like(weight, dtype=self.stored_dtype).detach()

    def read(self, weights: Tensors, stored: Tensors) -> Tensors:
        """Returns the float32 values."""
        # Fused kernels walk through memory linearly, and so need all their tensors in one layout: channels-last, too.
        values = [torch.empty_like(weight, dtype=torch.float32) for weight in weights]
        # The cast comes first: a difference of 16-bit numbers would be rounded to 16 bits.
        torch._foreach_copy_(values, list(weights))  # pyright: ignore[reportPrivateImportUsage]
        for each in zip(values, weights, stored, strict=True):
            self.add_lost(*each)
        return values

    def write(self, values: Tensors, weights: Tensors, stored: Tensors, parameters: Tensors) -> None:
        """Rounds the values into the weights, and stores what the rounding lost.

        `parameters` are the model's own, of which `weights` are this rank's parts if they are distributed.
        Values that `read` returned, written back unchanged, must change nothing: where a fused kernel has skipped the
        step, the host does not know it, and `write` is called all the same.
        """
        torch._foreach_copy_(list(weights), list(values))  # pyright: ignore[reportPrivateImportUsage]
        for each in zip(values, weights, stored, strict=True):
            self.store_lost(*each)

    def add_lost(self, value: Tensor, weight: Tensor, stored: Tensor) -> None:
        """Adds what is stored to `value`, which is the weight in float32."""

    def store_lost(self, value: Tensor, weight: Tensor, stored: Tensor) -> None:
        """Stores what the weight, which is the rounded value, has lost of it."""

    def restore(self, value: Tensor, weight: Tensor, stored: Tensor) -> None:
        """Loads saved values where they round to the weight. Elsewhere, and if nothing is stored, the weight counts."""
        if self.stores_values:
            stored.copy_(refined(weight, value))
        elif self.stored_bytes:
            self.write([refined(weight, value)], [weight], [stored], [weight])

    def end_step(self, skip: Tensor | None) -> None:
        """Ends a step whose values have all been written. `skip` is 1 where it was skipped; None if it was not."""

    def state(self) -> dict[str, Any]:
        """Returns what else is needed to resume bit-exactly."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Loads what `state` returned, of this storage or of another."""


def refined(weight: Tensor, value: Tensor) -> Tensor:
    """Returns `value` where no number of the weight's dtype is nearer to it than the weight; the weight elsewhere.

    At a tie both neighbors count as nearest: storages differ in which of the two they round to.
    """
    wide = weight.float()
    nearest = (wide - value).abs() <= (value.to(weight.dtype).float() - value).abs()
    return torch.where(nearest, value, wide)


class Full(MasterStorage):
    """Stores the float32 value. The weight is that value, rounded to nearest, ties to even."""

    stored_bytes: ClassVar[int] = 4
    stores_values: ClassVar[bool] = True

    def store(self, weight: Tensor) -> Tensor:
        return weight.detach().float()

    def read(self, weights: Tensors, stored: Tensors) -> Tensors:
        """Returns what is stored, without a copy."""
        return stored


class Remainder(MasterStorage):
    """Stores, as an int16, what a value loses when it is rounded.

    The weight is the value rounded to nearest. With BF16 every float32 value is restored bit-exactly. With FP16 those
    with 2**-17 <= |value| < 65520 are; smaller ones are restored within 2**-41, and larger ones are inf, as the weight.
    At a tie the weight may be the odd neighbor, where `.to(dtype)` takes the even one.
    """

    stored_bytes: ClassVar[int] = 2
    stored_dtype: ClassVar[torch.dtype | None] = torch.int16

    def add_lost(self, value: Tensor, weight: Tensor, stored: Tensor) -> None:
        if weight.dtype is torch.bfloat16:
            # The bits of float32 numbers of one sign are consecutive integers, across powers of two as well.
            value.view(torch.int32).add_(stored)
        else:
            value.sub_(_unit(value).mul_(stored))

    def store_lost(self, value: Tensor, weight: Tensor, stored: Tensor) -> None:
        """Stores the remainder, and moves weights at a tie.

        For BF16 it is how many float32 numbers lie between the two: the difference of their bits. For FP16 it is what
        the weight exceeds the value by, in units that depend on the weight; 0 if that is inf or NaN.
        """
        is_bfloat16, wide = weight.dtype is torch.bfloat16, weight.float()
        if is_bfloat16:
            lost = value.view(torch.int32) - wide.view(torch.int32)
        else:
            # The difference of neighbors is exact (Sterbenz), and so is the division by a power of two. `round_`
            # changes only values below 2**-17, whose last bits are below the unit.
            # Weight minus value, and `sub_` throughout: -0.0 - 0.0 is -0.0, and -0.0 + 0.0 is 0.0.
            lost = (wide - value).div_(_unit(wide)).round_().nan_to_num_(0.0, 0.0, 0.0)
        # 1 at a tie and 0 elsewhere. Arithmetic on whole numbers: a comparison and a cast of its bools are slower on
        # the CPU. The weight moves to its other neighbor, which is as near, and the remainder then fits: as an int16,
        # 2**15 wraps around to -2**15. With both of its ties an even BF16 weight would stand for 2**16 + 1 float32
        # values, one more than an int16 has.
        ties = (1 - (lost - TIE).abs_()).clamp_(min=0)
        if is_bfloat16:
            weight.view(torch.int16).add_(ties)
        else:
            weight.copy_(wide.sub_(ties, alpha=SUBNORMAL_STEP))
            lost.add_(ties, alpha=-2 * TIE)
        stored.copy_(lost)


def _unit(wide: Tensor) -> Tensor:
    """Returns half the distance between each number and the next float32.

    Half, since below a power of two float32 numbers are twice as dense as above it.
    """
    # The step at 2**e is 2**(e - 23): half of it has an exponent that is 24 less. The mask takes the exponent's bits.
    bits = wide.view(torch.int32).bitwise_and(0x7F80_0000).clamp_(min=SMALLEST)
    return bits.sub_(24 << 23).view(torch.float32)


class Kahan(MasterStorage):
    """Kahan compensation: stores what the weight exceeds the value by, rounded to the weight's dtype.

    A value has at least as many bits as two weights together: 16 for BF16, 22 for FP16. What FP16 can store of small
    weights is bounded by its smallest number, 2**-24.
    """

    stored_bytes: ClassVar[int] = 2

    def add_lost(self, value: Tensor, weight: Tensor, stored: Tensor) -> None:
        """Subtracts the error. The difference is exact."""
        value.sub_(stored)

    def store_lost(self, value: Tensor, weight: Tensor, stored: Tensor) -> None:
        # Weight minus value, not the reverse: -0.0 - 0.0 is -0.0, and -0.0 + 0.0 is 0.0. A step that only the device
        # knows to be skipped would change the sign of a weight of -0.0.
        wide = weight.float()
        # Beside a weight that is inf or NaN the difference is not finite, and nothing could be recovered from it.
        stored.copy_((wide - value).nan_to_num_(0.0, 0.0, 0.0))
        # The error may itself be rounded up to half a unit of the weight. The value would then round to another weight,
        # and writing back what was read would change it. The next error towards zero does not do so; its bits are one
        # less, for either sign.
        rounds_away = wide.sub_(stored).to(weight.dtype) != weight
        stored.view(torch.int16).sub_(rounds_away.to(torch.int16))


class Stochastic(MasterStorage):
    """Rounds to one of the two nearest weights, the nearer one with the higher probability.

    The expected weight is the value, so that updates far below half a unit in its last place add up. Beyond the largest
    finite number it rounds to nearest.

    The random numbers are a function of a seed and of the number of applied steps, the same on every device. Steps that
    are skipped are not counted, on the device where only that knows of the skip, so that training continues after a
    skip with the numbers that the skipped step would have used. A `torch.Generator` advances on the host, which would
    have to know.

    Args:
        seed: of the random numbers. Not drawn from torch's, whose seed may differ between ranks that hold replicas.
    """

    stored_bytes: ClassVar[int] = 0

    def __init__(self, seed: int = 0) -> None:
        self._seed = (seed + 2**63) % 2**64 - 2**63
        # In host memory until a skip is known to a device only. Kernels take it from there without synchronizing.
        self._steps = torch.zeros((), dtype=torch.int64, device="cpu")
        self._position = 0

    def store(self, weight: Tensor) -> Tensor:
        return weight.detach().new_empty(0)

    def write(self, values: Tensors, weights: Tensors, stored: Tensors, parameters: Tensors) -> None:
        """Rounds the values into the weights. Those that the dtype holds exactly are unchanged.

        Replicas of a parameter are rounded alike, and different parts of it by different random numbers.
        """
        for value, weight, parameter in zip(values, weights, parameters, strict=True):
            # Every 64-bit number has 16 random bits for each of four elements: drawing is most of the cost.
            words, whole = -(-value.numel() // 4), -(-parameter.numel() // 4)
            noise = self.draw(words, value.device, stream=_part_number(parameter), advance=whole)
            # float32 has 16 bits more than BF16 and 13 more than FP16. Of a subnormal FP16 number more would have to be
            # cut: 2**-14, the smallest normal one, is added first, after which its last bit is that of a normal number,
            # and subtracted afterwards. Both are exact but for bits far below the last.
            if weight.dtype is torch.bfloat16:
                rounded = _cut(value, 16, noise)
            else:
                # `ceil` makes 1 of every positive difference. `torch.where` on a comparison is slower on the CPU.
                lift = (2.0**-14 - value.abs()).clamp_(min=0.0).ceil_().mul_(2.0**-14).copysign_(value)
                # A difference of 0 is 0.0, also of two negative numbers: it takes the sign of the value.
                rounded = _cut(value + lift, 13, noise).sub_(lift).copysign_(value)
            weight.copy_(torch.where(value.abs() <= torch.finfo(weight.dtype).max, rounded, value))

    def draw(self, count: int, device: torch.device, *, stream: int = 0, advance: int | None = None) -> Tensor:
        """Returns the next `count` uniform random 64-bit numbers of this step. Does not synchronize with the device.

        Numbers of different streams differ. All streams go on by `advance` numbers, by default by `count`: ranks that
        hold parts of different sizes then still have the same numbers for what follows.
        """
        # Without waiting: on a device, kernels are queued behind the copy. Memory of the host is not valid before it.
        steps = self._steps if self._steps.is_cpu else self._steps.to(device, non_blocking=device.type != "cpu")
        key = _mixed(_mixed(steps.clone()).add_(self._seed))
        # A stream has 2**40 numbers, more than a step of any model draws.
        begin, self._position = self._position + stream * 2**40, self._position + (advance or count)
        return _mixed(torch.arange(begin, begin + count, device=device).add_(key))

    def end_step(self, skip: Tensor | None) -> None:
        """Counts the step, unless `skip`, a 0-d float32, is not 0. Does not synchronize with the device."""
        self._position = 0
        steps = self._steps if skip is None else self._steps.to(skip.device, non_blocking=not skip.is_cpu)
        self._steps = steps + (1 if skip is None else skip == 0.0)

    def state(self) -> dict[str, Any]:
        """Returns the seed and the number of applied steps."""
        return {"seed": self._seed, "steps": self._steps.clone()}

    def load(self, state: dict[str, Any]) -> None:
        """Continues the random numbers from `state`. The state of another storage is ignored."""
        if "seed" in state:
            self._seed, self._steps, self._position = state["seed"], state["steps"].clone(), 0


def _cut(value: Tensor, bits: int, noise: Tensor) -> Tensor:
    """Returns the values without their last `bits` bits, rounded away from zero with the probability of what is cut.

    Uniform random bits, 16 for each value in `noise`, are added to the bits that are cut off, and carry into the rest.
    """
    random = noise.view(torch.int16)[: value.numel()].view(value.shape).to(torch.int32).bitwise_and_((1 << bits) - 1)
    return random.add_(value.view(torch.int32)).bitwise_and_(-1 << bits).view(torch.float32)


def _mixed(numbers: Tensor) -> Tensor:
    """Returns the numbers with their bits mixed, so that neighbors have nothing in common. Changes them in place."""
    shifted = torch.empty_like(numbers)  # one for all three shifts: new memory would take longer than they do
    for multiplier, shift in ROUNDS:
        numbers.mul_(multiplier)
        torch.bitwise_right_shift(numbers, shift, out=shifted)
        # The shift of an int64 copies its sign, which the mask takes away.
        numbers.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
    return numbers


def _part_number(parameter: Any) -> int:
    """Returns which part of a parameter this rank holds: the same number for replicas, and 0 for a plain tensor."""
    number = 0
    for dim, placement in enumerate(getattr(parameter, "placements", ())):
        if not placement.is_replicate():
            number = number * parameter.device_mesh.size(dim) + parameter.device_mesh.get_coordinate()[dim]
    return number


_STORAGES = {"fp32": Full, "remainder": Remainder, "kahan": Kahan, "stochastic": Stochastic}


def make_storage(storage: Storage, seed: int | None = None) -> MasterStorage:
    """Returns a new storage. Only `"stochastic"` takes a `seed`, by default 0."""
    if storage not in _STORAGES:
        raise ValueError(
            f"`storage` must be one of {', '.join(map(repr, get_args(Storage)))}. Received: storage={storage!r}."
        )
    if storage == "stochastic":
        return Stochastic(seed or 0)
    if seed is not None:
        raise ValueError(
            "`seed` is for storage='stochastic', the only one that draws random numbers. "
            f"Received: seed={seed!r} with storage={storage!r}."
        )
    return _STORAGES[storage]()


def master_bytes(storage: Storage) -> int:
    """Returns how many bytes are stored beside each element of a 16-bit weight."""
    return _STORAGES[storage].stored_bytes


def bytes_per_parameter(storage: Storage, *, grad_fp32: bool = False) -> int:
    """Returns the bytes of a parameter: the 16-bit weight, what is stored beside it, and its gradient.

    The optimizer's own state, such as the 8 bytes of Adam's two moments, is not included. It is float32 in every
    storage.

    >>> {storage: bytes_per_parameter(storage) for storage in ("fp32", "remainder", "kahan", "stochastic")}
    {'fp32': 8, 'remainder': 6, 'kahan': 6, 'stochastic': 4}

    Args:
        storage: how the low bits are stored.
        grad_fp32: whether gradients are float32.
    """
    return torch.float16.itemsize + master_bytes(storage) + (4 if grad_fp32 else 2)
