"""The settings of a policy that would have served recorded runs best: a grid, then a refinement around its best."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from gradscale.formats import Format, get_format
from gradscale.policies.dynamic import Dynamic
from gradscale.policies.headroom import Headroom
from gradscale.policies.static import Static
from gradscale.replay.stack import Stack, stacked
from gradscale.report.what_if import HIDDEN, Evidence

if TYPE_CHECKING:
    from gradscale.recording.reader import Run

Vector = np.ndarray[Any, Any]

BIT = 0.001
"""What a bit below the best scale costs where no histograms were recorded: as much as a step skipped in a thousand."""

TOGETHER = 2048
"""Candidates that run as one vector: about ten vectors of them fit the cache of a core."""


def _short(value: float) -> float:
    return float(f"{value:.2g}")


RANGES: Mapping[type[Any], Mapping[str, tuple[float, float, Callable[[float], Any]]]] = {
    Static: {"scale": (-8, 40, lambda u: 2.0 ** round(u))},
    Dynamic: {
        "init_scale": (4, 32, lambda u: 2.0 ** round(u)),
        "growth_interval": (3, 12, lambda u: int(_short(2.0**u))),
        "backoff_factor": (-4, -1, lambda u: 2.0 ** round(u)),
        "hysteresis": (1, 3, round),
    },
    Headroom: {
        "margin_bits": (0, 8, lambda u: float(round(u))),
        "leak": (-12, -4, lambda u: _short(2.0**u)),
        "recovery": (-22, -8, lambda u: 2.0 ** round(u)),
    },
}
"""The settings that are varied: the ends of a coordinate, and the value that belongs to it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy, and what it would have done in all of the runs together.

    Attributes:
        policy: the policy.
        skipped: share of steps skipped.
        lost: share of gradient elements left at zero in sampled steps; NaN where no histograms were recorded.
        bits_below: mean bits of the scale below the highest power of two that fits.
    """

    policy: Any
    skipped: float
    lost: float
    bits_below: float

    @property
    def cost(self) -> float:
        """What did not reach the weights: the share of steps, and of elements in the others."""
        return self.skipped + (self.bits_below * BIT if np.isnan(self.lost) else self.lost)


def tune(runs: Sequence["Run"], candidates: int = 2000) -> list[Candidate]:
    """Returns policies, the best first: half of them a grid of settings, half near its best.

    The gradients are taken as they were recorded; another scale would have changed them a little. A policy that reads
    what a run does not have is left out.

    Args:
        runs: the recorded runs; each counts by its steps.
        candidates: how many policies are tried.

    Raises:
        ValueError: there is no run, or one has no steps or no scale.
    """
    if not runs or not all(np.isfinite(run.scale).any() for run in runs):
        raise ValueError(f"`tune` needs runs that have steps and scales. Received: {list(runs)!r}.")
    evidence = [Evidence(run) for run in runs]
    sized = all(np.isfinite(each.amax).any() for each in evidence)
    kinds = [kind for kind in RANGES if kind is not Headroom or sized]
    format, policies = get_format(runs[0].format), dict[Any, Vector]()
    for kind in kinds:
        each = int((candidates / 2 / len(kinds)) ** (1 / len(RANGES[kind])))
        ends = [np.linspace(low, high, max(2, each)) for low, high, _ in RANGES[kind].values()]
        policies |= {_policy(kind, point, format): np.array(point) for point in product(*ends)}
    tried = _tried(evidence, list(policies))
    rng, best, known = np.random.default_rng(0), [*tried[:32], *front(tried)[:32]], len(policies)
    for index in range(4 * candidates):  # most of the points near the best round to policies of their own
        if len(policies) >= candidates:
            break
        around = best[index % len(best)].policy
        lows, highs = (np.array(ends) for ends in list(zip(*RANGES[type(around)].values(), strict=True))[:2])
        point = np.clip(policies[around] + rng.normal(size=lows.size) * (highs - lows) / 16, lows, highs)
        policies.setdefault(_policy(type(around), point, format), point)
    return _best_first([*tried, *_tried(evidence, list(policies)[known:])])


def front(tried: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates that no other beats in both skips and loss, the fewest skips first."""
    loss = [each.bits_below if np.isnan(each.lost) else each.lost for each in tried]
    kept, least = list[Candidate](), np.inf
    for index in sorted(range(len(tried)), key=lambda index: (tried[index].skipped, loss[index])):
        if loss[index] < least:
            kept.append(tried[index])
            least = loss[index]
    return kept


def _policy(kind: Any, point: Iterable[float], format: Format) -> Any:
    settings = {name: value(u) for u, (name, (_, _, value)) in zip(point, RANGES[kind].items(), strict=True)}
    return kind(format=format, **settings) if kind is Headroom else kind(**settings)


def _best_first(tried: list[Candidate]) -> list[Candidate]:
    return sorted(tried, key=lambda each: (each.cost, each.bits_below))


def _tried(evidence: Sequence[Evidence], policies: Sequence[Any]) -> list[Candidate]:
    """Returns the candidates, the best first."""
    steps = sum(each.steps for each in evidence)
    elements = sum(count for each in evidence for count, _ in each.lost.values())
    rows = sum(int(np.isfinite(each.best).sum()) for each in evidence)
    tried: list[Candidate] = []
    policies = sorted(policies, key=lambda each: type(each).__name__)  # so that a block is one stack
    for begin in range(0, len(policies), TOGETHER):
        for stack in stacked(block := policies[begin : begin + TOGETHER]):
            totals = np.sum([_sums(each, stack) for each in evidence], axis=0)
            with np.errstate(invalid="ignore"):
                columns = (totals.T / [steps, elements, rows]).tolist()
            tried += [Candidate(block[member], *each) for member, each in zip(stack.members, columns, strict=True)]
    return _best_first(tried)


@np.errstate(all="ignore")
def _sums(evidence: Evidence, stack: Stack) -> tuple[Vector, Vector, Vector]:
    """Returns skips, lost elements and bits below the best of each policy, summed over the steps of a run."""
    state = stack.state
    start = state.skipped
    zeros, below = np.zeros((2, len(stack.members)))
    for row in range(evidence.steps):
        if not evidence.attempted[row]:
            continue
        scale = state.scale
        finite = (scale <= evidence.clean_to[row]) & evidence.loss_finite[row]
        seen = evidence.seen(row, finite, np.where(finite, evidence.amax[row], HIDDEN))
        if np.isfinite(evidence.best[row]):
            # `frexp` for `log2`: exact for powers of two, and several times as fast.
            below += np.maximum(evidence.best[row] + 1 - np.frexp(scale)[1], 0)
        if row in evidence.lost:
            zeros += evidence.lost[row][1](np.log2(scale))
        state = stack.policy.next(state, seen, np)
    return state.skipped - start, zeros, below
