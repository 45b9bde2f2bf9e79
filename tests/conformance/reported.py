"""The result of a step as plain Python values, read by the names that every adapter's result has."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gradscale import Status
from gradscale.engine.culprits import Culprit

ATTRIBUTES = ("applied", "scale", "next_scale", "loss_finite", "grad_norm", "amax", "retries", "attempted")
METHODS = ("skipped", "status", "culprits")


@dataclass(frozen=True)
class Reported:
    """What a result says, on the host.

    Attributes:
        missing: names that the result lacks, or has as another kind of thing. Their values here are a best guess, so
            that a wrong name fails the test of names and hides nothing else.
        applied: as in `gradscale.engine.result.StepResult`, and so are all that follow.
    """

    missing: tuple[str, ...]
    applied: bool
    scale: float
    next_scale: float
    loss_finite: bool
    grad_norm: float | None
    amax: float | None
    retries: int
    attempted: bool
    skipped: bool
    status: Status
    culprits: list[Culprit]


def reported(result: Any) -> Reported:
    """Returns what `result` says. Synchronizes with the device."""
    values = {name: _on_host(getattr(result, name, None)) for name in ATTRIBUTES}
    methods = {name: getattr(result, name, None) for name in METHODS}
    missing = [name for name in ATTRIBUTES if not hasattr(result, name)]
    missing += [f"{name}()" for name, method in methods.items() if not callable(method)]
    called: dict[str, Any] = {name: method() if callable(method) else method for name, method in methods.items()}
    return Reported(tuple(missing), **values, **called)


def _on_host(value: Any) -> Any:
    return None if value is None else np.asarray(value).tolist()
