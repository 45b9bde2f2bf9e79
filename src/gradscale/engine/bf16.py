"""The note that loss scaling is not needed in BF16: in the log, once per process, whatever number of scalers run."""

import logging
from typing import Any

from gradscale.formats import FP16
from gradscale.policies.contract import Policy
from gradscale.policies.static import multiplies

logger = logging.getLogger(__name__)

_noted: list[str] = []


def note_bf16(policy: Policy, found: str, instead: str) -> None:
    """Logs that a scaler is not needed, if this process has not yet. A warning could be made an error; a log cannot.

    Args:
        policy: of the scaler. Nothing is logged unless it scales for FP16, as all do unless told otherwise.
        found: what runs in BF16, a sentence.
        instead: what to do, a sentence.
    """
    made_for: Any = getattr(policy, "format", FP16)
    if _noted or not multiplies(policy) or made_for != FP16:
        return
    _noted.append(found)
    logger.warning(
        "%s BF16 has the range of float32, so that gradients neither vanish nor overflow, and scaling only costs time. "
        "%s To go on skipping steps whose gradients are inf or NaN, at the cost of the check alone, use "
        "`policy=CheckOnly()`. This is logged once.",
        found,
        instead,
    )
