"""A look at the gradients of a step: the facts the decision is made from, and who is to blame."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradscale.mxnet.gradients import Gradients
from gradscale.mxnet.measure import Measured, agree, measure
from gradscale.numpy.measure import measure as measure_on_host
from gradscale.numpy.result import Culprit
from gradscale.policies.contract import Policy, Seen


@dataclass(frozen=True, slots=True)
class Look:
    """What was found.

    Attributes:
        seen: the facts the decision is made from.
        culprits: the parameters whose gradients were not finite.
        norm: the norm of all gradients as the optimizer will see them; None if nobody wanted to know.
        amax: the largest magnitude, unscaled; None if nobody wanted to know.
    """

    seen: Seen
    culprits: tuple[Culprit, ...]
    norm: float | None
    amax: float | None

    def after(self, early: "Look") -> "Look":
        """Returns this look at gradients that were looked at before, and may have been edited since.

        An overflow that was seen then stays one, whatever has become of it. The norm is the one of now.
        """
        seen = replace(
            self.seen,
            finite=np.logical_and(self.seen.finite, early.seen.finite),
            amax=early.seen.amax,
            upper_share=early.seen.upper_share,
        )
        return Look(seen, early.culprits or self.culprits, self.norm, early.amax)


def look(gradients: Gradients, policy: Policy, *, norm: bool, unit: float, rescale: float) -> Look:
    """Returns what is found in the gradients of all contexts. Reads none if there are none, or nobody wants to know.

    Args:
        gradients: the gradients on each context.
        policy: says what it needs.
        norm: whether the norm is wanted even if the policy does not need a look.
        unit: what the gradients are to be divided by.
        rescale: what the optimizer will multiply them by besides.
    """
    if not any(gradients) or not (norm or policy.needs):
        return Look(Seen(), (), None, None)
    measured = measure([[slot.values for slot in slots] for slots in gradients], policy)
    seen = agree(measured, unit=unit, rescale=rescale)
    culprits = () if seen.finite else _culprits(gradients, measured, unit, rescale)
    return Look(seen, culprits, float(seen.norm), float(seen.amax) if "amax" in policy.needs else None)


@np.errstate(divide="ignore", over="ignore", invalid="ignore")
def _culprits(gradients: Gradients, measured: Sequence[Measured], unit: float, rescale: float) -> tuple[Culprit, ...]:
    """Returns the parameters that are not finite, each as the first context has it. Copies these to the host."""
    factor = float(np.divide(rescale, unit))
    found: dict[str, Any] = {}
    for slots, one in zip(gradients, measured, strict=True):
        bad = ~np.isfinite((one.sizes * factor).astype(np.float32))
        found = {slot.name: slot for slot, is_bad in zip(slots, bad, strict=True) if is_bad} | found
    counted = {name: measure_on_host(slot.values.asnumpy(), factor) for name, slot in found.items()}
    return tuple(Culprit(name, one.infs, one.nans) for name, one in counted.items())
