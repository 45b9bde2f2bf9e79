"""A whole step of a rule as one function of a few numbers, and its state as one vector of int32.

So it can be traced, and printed for the host and for a device, where it is one kernel.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gradscale.engine.decide import CLIP_EPSILON
from gradscale.engine.measurement import Measurement, with_amax
from gradscale.policies.arithmetic import Namespace, smaller
from gradscale.policies.compiled import compiled
from gradscale.policies.contract import Policy, ScaleState, Seen, bounded_next, counted_as_applied
from gradscale.policies.static import multiplies
from gradscale.record import Array, fields, with_values

Vector = np.ndarray[Any, np.dtype[np.int32]]
"""A state as int32: floats by their bits, flags as 0 and 1."""


class Read(NamedTuple):
    """What is read of gradients and losses, as scaled. Fields that are None are not read.

    Attributes:
        amax: the largest magnitude of any gradient; not finite if one of them is not.
        norm: the norm over all gradients; not finite likewise.
        loss: the largest magnitude of any loss; not finite likewise.
        clip_norm: bound on the unscaled norm.
        upper_share: the share of gradient elements above the edge of a policy.
    """

    amax: Array | None
    norm: Array | None
    loss: Array
    clip_norm: Array | None = None
    upper_share: Array | None = None


class Outcome(NamedTuple):
    """What a step has found and decided, beside the next state.

    Attributes:
        amax_ratio: the ratio of the largest magnitude to the norm.
        found_inf: 1 if the step is not applied, else 0.
        divisor: what the gradients are divided by, to unscale and clip them.
        finite: as in `Seen`; so are the next four.
        loss_finite: as said.
        amax: as said; estimated from the norm where it was not read.
        norm: as said.
        upper_share: as said.
        made_with: the scale that made the gradients.
    """

    amax_ratio: Array
    found_inf: Array
    divisor: Array
    finite: Array
    loss_finite: Array
    amax: Array
    norm: Array
    upper_share: Array
    made_with: Array

    @property
    def seen(self) -> Seen:
        """What was seen of the step."""
        return Seen(self.finite, self.loss_finite, self.amax, self.norm, self.upper_share)


BLOCK = 128
"""Numbers that a kernel reads at once, a power of two."""

_ZERO, _ONE, _TRUE = np.float32(0), np.float32(1), np.bool_(True)

START = Outcome(_ONE, _ZERO, _ONE, _TRUE, _TRUE, _ZERO, _ZERO, _ZERO, _ONE)
"""What a rule starts from: an unknown ratio, which is 1 at most."""


@dataclass(frozen=True)
class Packed:
    """The step of a policy on a state that is one vector: the leaves of the state in order, then those of `Outcome`.

    Attributes:
        policy: the rule.
        norm: whether the norm is read.
        amax: whether the largest magnitude is read; always where the norm is not.
        clips: whether gradients are clipped by the norm.
        shrinks: whether a scale below 1, which makes gradients larger, counts as an overflow: where they were divided
            before their size is known, or are stored in FP16.
        loss_gates: whether a loss that is not finite keeps finite gradients from being applied.
    """

    policy: Policy
    norm: bool = False
    amax: bool = True
    clips: bool = False
    shrinks: bool = False
    loss_gates: bool = True

    @property
    def shares(self) -> bool:
        """Whether the share of elements above an edge is read."""
        return "upper_share" in self.policy.needs

    @cached_property
    def kinds(self) -> Mapping[str, type]:
        """The names of the numbers in the vector, in order, and their types."""
        start = self.policy.start()
        leaves = {field.name: np.asarray(getattr(start, field.name)).dtype.type for field in fields(start)}
        return leaves | {name: type(value) for name, value in START._asdict().items()}

    def at(self, name: str) -> int:
        """Returns the place of a number in the vector."""
        return list(self.kinds).index(name)

    def holds(self, state: ScaleState) -> bool:
        """Returns whether the vector has room for the numbers of a state: those of one that was loaded may be wider."""
        return all(np.asarray(getattr(state, each.name)).dtype == self.kinds[each.name] for each in fields(state))

    def pack(self, state: ScaleState, outcome: Outcome = START) -> Vector:
        """Returns a state, and what the step before it has found, as a vector; of vectors, as one row for each."""
        values = [*(getattr(state, field.name) for field in fields(state)), *outcome]
        return _packed(values, self.kinds.values())

    def unpack(self, vector: Vector) -> tuple[ScaleState, Outcome]:
        """Returns what `pack` has packed."""
        numbers: dict[str, Any] = {
            name: vector[..., place].astype(np.bool_) if kind is np.bool_ else vector[..., place].view(kind)
            for place, (name, kind) in enumerate(self.kinds.items())
        }
        outcome = Outcome(*(numbers.pop(name) for name in Outcome._fields))
        return with_values(self.policy.start(), numbers), outcome

    def read(self, numbers: Array, first: int, end: int, clip_norm: float) -> Read:
        """Returns what a vector of float32 says, or each row of a matrix.

        The norms of all gradients, up to `first`, if norms are read; up to `end` their largest magnitudes, if these are
        read; then the losses, one or more; and last the share above an edge, if the policy needs it.
        """
        numbers, share = (numbers[..., :-1], numbers[..., -1]) if self.shares else (numbers, None)
        return Read(
            np.abs(numbers[..., first:end]).max(-1) if self.amax else None,
            norm_of(numbers[..., :first]) if self.norm else None,
            np.abs(numbers[..., end:]).max(-1),
            np.float32(clip_norm) if self.clips else None,
            share,
        )

    @property
    def operands(self) -> dict[str, Any]:
        """Examples of the operands of `step`."""
        one = np.float32(1)
        asked = self.amax, self.norm, True, self.clips, self.shares
        read = Read(*(one if each else None for each in asked))
        return {"state": self.policy.start(), "amax_ratio": one, "read": read}

    def step(self, state: Any, amax_ratio: Array, read: Read, xp: Namespace) -> tuple[Array, ...]:
        """Returns the numbers of the next vector."""
        total = read.amax if read.norm is None else read.norm
        measurement = Measurement(None, total, read.amax, read.norm, read.upper_share)
        grown = state.scale < 1.0 if self.shrinks else None
        seen = measurement.seen(state.scale, xp.isfinite(read.loss), xp, grown)
        known = seen
        if self.norm and "amax" in self.policy.needs:
            known, amax_ratio = with_amax(seen, amax_ratio, xp, measured=self.amax)
        after, applied = bounded_next(self.policy, state, known, xp), seen.finite
        if self.loss_gates:
            applied = xp.logical_and(applied, seen.loss_finite)
        else:
            after = counted_as_applied(state, after, seen, xp)
        found_inf = xp.where(applied, 0.0, state.scale * 0 + 1.0)
        divisor = state.scale if multiplies(self.policy) else state.scale * 0 + 1.0
        if read.clip_norm is not None:
            divisor = divisor / smaller(read.clip_norm / (seen.norm + CLIP_EPSILON), 1.0, xp)
        found = seen.finite, seen.loss_finite, known.amax, seen.norm, seen.upper_share
        outcome = Outcome(amax_ratio, found_inf, divisor, *found, state.scale)
        return *(getattr(after, field.name) for field in fields(after)), *outcome

    @cached_property
    def on_host(self) -> Callable[[Vector, Read], Vector]:
        """`step` of a vector in host memory, to the next one. numpy's warnings must be off."""
        run = compiled(self.step, **self.operands)

        def following(vector: Vector, read: Read) -> Vector:
            state, outcome = self.unpack(vector)
            return _packed(run(state, outcome.amax_ratio, read), self.kinds.values())

        return following


def norm_of(sizes: Array) -> Array:
    """Returns the norm of sizes in float32, added in the order in which a kernel adds them: in `BLOCK` sums.

    Then the first half of the sums is added to the second, until one is left.
    """
    blocks = np.zeros((*sizes.shape[:-1], -(-sizes.shape[-1] // BLOCK) * BLOCK), np.float32)
    blocks[..., : sizes.shape[-1]] = sizes
    sums = np.zeros((*sizes.shape[:-1], BLOCK), np.float32)
    for start in range(0, blocks.shape[-1], BLOCK):
        sums += np.square(blocks[..., start : start + BLOCK])
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return np.sqrt(sums[..., 0])


def _packed(values: Sequence[Any], kinds: Iterable[type]) -> Vector:
    numbers: list[Any] = [np.asarray(value, kind) for value, kind in zip(values, kinds, strict=True)]
    return np.stack([each.astype(np.int32) if each.dtype == np.bool_ else each.view(np.int32) for each in numbers], -1)
