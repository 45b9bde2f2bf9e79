"""What other policies would have done in a run, from its record."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradscale.engine.host import rule_on_host
from gradscale.engine.result import Status
from gradscale.engine.saved import Saved
from gradscale.formats import get_format
from gradscale.histogram.counts import EXPONENTS
from gradscale.policies.checks import HIGHEST_SCALE
from gradscale.policies.contract import Policy, Seen

if TYPE_CHECKING:
    from gradscale.recording.reader import Run

Vector = np.ndarray[Any, Any]

HIDDEN = np.float32(np.inf)
"""What a rule is given as the largest gradient of a step that overflowed."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a policy would have done with the gradients of a run, if they had not changed by it.

    Attributes:
        policy: the policy.
        scales: the scale of each step.
        skipped: whether each step would have been skipped.
        undecided: whether the record does not say if a step would have overflowed at that scale.
        stuck: whether the last step would have overflowed with no lower scale to go to.
        bits_below: mean bits of the scale below the highest power of two that fits, over the steps whose largest
            gradient is known; NaN without one.
        share_lost: share of the gradient elements of sampled steps that the scale leaves at zero; NaN without samples.
    """

    policy: Policy
    scales: Vector
    skipped: Vector
    undecided: Vector
    stuck: bool
    bits_below: float
    share_lost: float


class Evidence:
    """What a record says of the gradients of a run, for any scale.

    A step that was applied is clean at its scale and below, and above that as long as its largest gradient fits. One
    that overflowed does so at its scale and above. Below that it is undecided, and taken to be clean, since a lower
    scale is what a rule tries next. A clean step of unknown size is undecided above its scale, and taken to overflow.

    Attributes:
        clean_to: the highest scale at which each step is clean.
        amax: largest gradient, or the norm, which bounds it, or that of the step before where neither is known.
        measured: whether amax is that of the step.
        best: log2 of the highest power of two that fits.
        lost: by the row of a sampled step, its nonzero gradient elements and a function of log2 of a scale that returns
            how many of them it leaves at zero.
    """

    def __init__(self, run: "Run") -> None:
        self.run, self.steps, limits = run, len(run), get_format(run.format)
        applied, threshold = run.applied, limits.overflow_threshold
        self.loss_finite = run.status != Status.NONFINITE_LOSS.value
        self.attempted = run.status != Status.NO_GRADS.value
        size = np.where(np.isfinite(run.amax), run.amax, run.norm)
        known = applied & np.isfinite(size)
        self.measured = applied & np.isfinite(run.amax)
        with np.errstate(divide="ignore"):
            fits = np.minimum(np.nextafter(threshold / np.where(known, size, np.nan), 0), HIGHEST_SCALE)
        self.best = np.where(self.measured, np.frexp(fits)[1] - 1.0, np.nan)
        scale = np.where(np.isfinite(run.scale), run.scale, 0)
        self.clean_to = np.where(applied, np.fmax(fits, scale), np.nextafter(scale, 0))
        # The last known size before each step, of the first known one before that.
        rows = np.maximum.accumulate(np.where(known, np.arange(self.steps), int(known.argmax()) if known.any() else 0))
        self.amax = np.where(known.any(), size[rows], np.nan).astype(np.float32)
        edge = int(np.frexp(limits.smallest_subnormal)[1] - 2)  # exponent of half of it: what is below becomes zero
        self.lost: dict[int, tuple[int, Any]] = {}
        for row, tallies in run.watch.items():
            if gradients := [each.histogram.host_counts for each in tallies if each.kind == "weight_grad"]:
                counts = np.cumsum([0, *np.sum(gradients, axis=0)])
                ends = np.append(EXPONENTS, EXPONENTS[-1] + 1)
                self.lost[row] = int(counts[-1]), lambda log2, c=counts, e=ends: np.interp(edge - log2, e, c)

    def check(self, policy: Policy) -> None:
        """Raises ValueError if the record does not have what `policy` reads."""
        for name, column in (("amax", self.amax), ("upper_share", self.run.share)):
            if name in policy.needs and not np.isfinite(column).any():
                raise ValueError(
                    f"{type(policy).__name__} reads `{name}`, which {self.run.name} does not have. Record a run with a "
                    "policy that reads it, such as `Headroom`, or with `clip_norm`."
                )

    def seen(self, row: int, finite: Any, amax: Any = None) -> Seen:
        """Returns what a rule would see in a step that is `finite` or not."""
        run = self.run
        return Seen(
            finite=finite,
            loss_finite=np.bool_(self.loss_finite[row]),
            amax=self.amax[row] if amax is None else amax,
            norm=np.float32(run.norm[row]),
            upper_share=np.float32(run.share[row]),
        )

    def undecided(self, scales: Vector) -> Vector:
        """Returns whether the record does not say if each step would have overflowed at its scale in `scales`."""
        applied, run = self.run.applied, self.run
        below = (run.status == Status.OVERFLOW.value) & (scales <= self.clean_to)
        return below | (applied & ~self.measured & (scales > self.clean_to))

    def share_lost(self, scales: Vector) -> float:
        """Returns the share of the gradient elements of sampled steps that the scale of each step leaves at zero."""
        total = sum(count for count, _ in self.lost.values())
        zeros = sum(lost(np.log2(scales[row])) for row, (_, lost) in self.lost.items())
        return float(zeros) / total if total else float("nan")


def predict(run: "Run", policies: Sequence[Policy]) -> list[Prediction]:
    """Returns what each policy would have done.

    A policy that made a part of the record begins there with the state that the header has: with the scales and skips
    of the run, exactly. Others begin once, with their own start.

    Raises:
        ValueError: a policy reads what the record does not have.
    """
    evidence = Evidence(run)
    return [_predicted(evidence, policy) for policy in policies]


def own_policies(run: "Run") -> dict[int, Saved]:
    """Returns what a run was made with: by the row where it begins, the saved policy and state of each part.

    Those of a user's own class, which is not loaded here, are left out.
    """
    found: dict[int, Saved] = {}
    for row, header in run.parts:
        with suppress(ValueError):
            found[row] = header.saved()
    return found


@np.errstate(all="ignore")
def _predicted(evidence: Evidence, policy: Policy) -> Prediction:
    evidence.check(policy)
    parts = own_policies(evidence.run)
    starts = {row: saved.state for row, saved in parts.items() if saved.policy == policy}
    rule = rule_on_host(policy)
    state: Any = policy.start()
    scales, skipped = np.empty(evidence.steps), np.zeros(evidence.steps, bool)
    for row in range(evidence.steps):
        state = starts.get(row, state)
        scales[row] = state.scale
        if evidence.attempted[row]:
            finite = np.bool_(evidence.loss_finite[row] and state.scale <= evidence.clean_to[row])
            after = rule(state, evidence.seen(row, finite, None if finite else HIDDEN))
            skipped[row] = after.skipped != state.skipped
            state = after
    below = (evidence.best - np.log2(scales))[np.isfinite(evidence.best)]
    return Prediction(
        policy,
        scales,
        skipped,
        evidence.undecided(scales),
        bool(state.stuck),
        float(np.maximum(below, 0).mean()) if below.size else float("nan"),
        evidence.share_lost(scales),
    )
