"""The plan of a step, made before anything is measured: what to read of the gradients."""

from dataclasses import dataclass
from typing import Self

from gradscale.policies.contract import Policy


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step reads of the gradients.

    Attributes:
        checks: whether anything is read at all. `NoScaling` checks nothing.
        amax: whether the policy needs the largest magnitude.
        norm: whether the norm was asked for, by the caller or to clip.
        edge: scaled magnitude above which elements are counted for the policy; None where it does not need them.
    """

    checks: bool
    amax: bool
    norm: bool
    edge: float | None

    @classmethod
    def of(cls, policy: Policy, *, norm: bool = False, clip_norm: float | None = None) -> Self:
        """Returns the plan for a step under `policy`: its `needs`, and the norm if it is asked for or clipped."""
        return cls(bool(policy.needs), "amax" in policy.needs, norm or clip_norm is not None, edge_of(policy))


def edge_of(policy: Policy) -> float | None:
    """Returns the scaled magnitude above which elements are counted for the policy; None if it does not need them."""
    return float(policy.edge_magnitude) if "upper_share" in policy.needs else None  # type: ignore[attr-defined]
