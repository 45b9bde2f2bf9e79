"""The policies that are compared."""

from dataclasses import dataclass, replace
from typing import Any

from gradscale import CheckOnly, Format, Headroom, Histogram, LogMax, Policy, preset

FP32_RUN = "FP32"
"""The run that others are compared with: nothing is rounded, and nothing scaled. Gradients that are not
finite are skipped, as they have no use in any precision."""

BASELINE = "torch"
SUBJECT = "auto"


@dataclass(frozen=True)
class Rule:
    """A policy of the study.

    Attributes:
        policy: the policy, for FP16.
    """

    policy: Any

    def for_run(self, format: Format, init_scale: float | None) -> Policy:
        """Returns the policy for gradients of the format, started at `init_scale`."""
        changes: dict[str, Any] = {"format": format} if hasattr(self.policy, "format") else {}
        if init_scale is not None and hasattr(self.policy, "init_scale"):
            changes["init_scale"] = init_scale
        return replace(self.policy, **changes)


RULES: dict[str, Rule] = {
    FP32_RUN: Rule(CheckOnly()),
    BASELINE: Rule(preset("torch")),
    SUBJECT: Rule(Headroom()),
    "DeepSpeed": Rule(preset("deepspeed")),
    "Megatron": Rule(preset("megatron")),
    "LogMax": Rule(LogMax()),
    "Histogram": Rule(Histogram()),
}
"""The policies by name, in the order in which they are run. `Dynamic()` has torch's rule above a scale of 1, and so
its rows."""
