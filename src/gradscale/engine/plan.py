"""The plan of a step, made before anything is measured: what to read of the gradients, and for whom."""

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
        edge: magnitude, scaled, above which the policy wants elements to be counted; None where it does not.
    """

    checks: bool
    amax: bool
    norm: bool
    edge: float | None

    @classmethod
    def of(cls, policy: Policy, *, norm: bool = False, clip_norm: float | None = None) -> Self:
        """Returns the plan for a step under `policy`.

        Args:
            policy: names what it reads in its `needs`.
            norm: whether the caller wants the norm.
            clip_norm: bound on the norm, which must be known to clip by it.
        """
        edge = float(policy.edge_magnitude) if "upper_share" in policy.needs else None  # type: ignore[attr-defined]
        return cls(
            checks=bool(policy.needs), amax="amax" in policy.needs, norm=norm or clip_norm is not None, edge=edge
        )
