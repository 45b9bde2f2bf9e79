"""The policies that are compared."""

from dataclasses import dataclass, replace
from typing import Any

from gradscale import Dynamic, Format, Headroom, Histogram, LogMax, NoScaling, Policy, preset

FP32_RUN = "FP32"
"""The run that others are compared with: nothing is rounded, and nothing scaled."""

BASELINE = "torch"
SUBJECT = "auto"


@dataclass(frozen=True)
class Rule:
    """A policy of the study.

    Attributes:
        policy: the policy, for FP16.
        retries: how often a backward pass is run again until a first step was applied.
    """

    policy: Any
    retries: int = 0

    def for_run(self, format: Format, init_scale: float | None) -> Policy:
        """Returns the policy for gradients of the format, started at `init_scale`."""
        changes: dict[str, Any] = {"format": format} if hasattr(self.policy, "format") else {}
        if init_scale is not None and hasattr(self.policy, "init_scale"):
            changes["init_scale"] = init_scale
        return replace(self.policy, **changes)


RULES: dict[str, Rule] = {
    FP32_RUN: Rule(NoScaling()),
    BASELINE: Rule(preset("torch")),
    SUBJECT: Rule(Headroom(), retries=1),
    "Headroom, no retry": Rule(Headroom()),
    "DeepSpeed": Rule(preset("deepspeed")),
    "Megatron": Rule(preset("megatron")),
    "LogMax": Rule(LogMax()),
    "Histogram": Rule(Histogram()),
    "Dynamic": Rule(Dynamic()),
}
"""The policies by name, those first that the claims are about."""
