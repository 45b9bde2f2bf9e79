"""A probe that a run makes by itself after so many skipped steps in a row."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradscale.engine.probe_report import ProbeReport, Verdict
from gradscale.torch.probing.run import AnyRank, Step, check_loss
from gradscale.torch.ranks.groups import is_first_rank
from gradscale.torch.step.result import StepResult

logger = logging.getLogger(__name__)

SHARE = 0.01
"""Share of the time that automatic probes may take. The first comes at once."""

EVERY_S = 600.0
"""Seconds between two lines in the log that say the same."""


@dataclass(slots=True)
class AutomaticProbe:
    """Probes the step that is the `skips`-th in a row to be skipped, and logs and keeps the report.

    One probe for each row of skipped steps. `step` and `run` are as in `probe`, with the scale as the argument of
    `run`. What `on_report` raises ends training; an error of the step is logged, and ends automatic probes.
    """

    skips: float
    step: Step
    run: Callable[[Step, float], ProbeReport]
    any_rank: AnyRank
    on_report: Callable[[ProbeReport], object]
    _probed: bool = False
    _next_s: float = -math.inf
    _logged: tuple[Any, ...] = ()
    _logged_s: float = -math.inf

    def note(self, skipped: int, result: StepResult) -> None:
        """Probes if enough steps have been skipped in a row. Synchronizes with the device only then."""
        if skipped < self.skips:
            self._probed = False
        elif not (self._probed or self._any([time.monotonic() < self._next_s], result)[0]):
            self._probed = True
            self._probe(skipped, result)

    def _probe(self, skipped: int, result: StepResult) -> None:
        errors: list[Exception] = []

        def step() -> Tensor:
            """Returns the loss of the step; NaN if it raises, so that other ranks do not wait for this one."""
            try:
                return check_loss(self.step())
            except Exception as error:
                errors.append(error)
                return torch.full((), math.nan, device=result.scale.device, requires_grad=True)

        report: ProbeReport | None = None
        start_s = time.monotonic()
        try:
            with torch.enable_grad():
                report = self.run(step, float(result.scale))
        except Exception as error:  # whatever the user's step or a kernel raises must not end training
            errors.append(error)
        end_s = time.monotonic()
        self._next_s = end_s + (end_s - start_s) * (1 / SHARE - 1)
        bad = report is not None and report.verdict is not Verdict.FINITE
        failed, bad_on_first, bad_anywhere = self._any([bool(errors), bad and is_first_rank(), bad], result)
        if errors:
            logger.warning("The automatic probe is off: its step raised an error.", exc_info=errors[-1])
        if failed or report is None:
            self.skips = math.inf
            return
        # On a device they may be known late. If this step was applied, the row of them has ended by itself.
        if not bad_anywhere and not result.skipped():
            return
        found = report.verdict, report.tensor, report.operation and (report.operation.name, report.operation.module)
        # Rank 0 logs for all; if its own numbers are finite, those do whose are not.
        logs = is_first_rank() if bad_on_first or not bad_anywhere else bad
        if logs and (found != self._logged or end_s - self._logged_s >= EVERY_S):
            self._logged, self._logged_s = found, end_s
            short = str(report).partition("\nOperations before it:")[0]
            logger.warning("%d steps in a row were skipped. A probe found: %s", skipped, short)
        self.on_report(report)

    def _any(self, flags: list[bool], result: StepResult) -> list[bool]:
        """Returns which flags are set on any rank. Every rank must call it."""
        return self.any_rank(torch.tensor(flags, device=result.scale.device))
