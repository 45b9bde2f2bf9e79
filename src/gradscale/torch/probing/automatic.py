"""A probe that a run makes by itself after so many skipped steps in a row."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.probing.report import ProbeReport, Verdict
from gradscale.torch.probing.run import AnyRank, Step, check_loss
from gradscale.torch.ranks.log import is_first_rank
from gradscale.torch.step.result import StepResult

logger = logging.getLogger(__name__)

SHARE = 0.01
"""Share of the time that automatic probes may take. The first comes at once."""

EVERY_S = 600.0
"""Seconds between two lines in the log that say the same."""

Run = Callable[[Step, float], ProbeReport]


class AutomaticProbe:
    """Probes the step that is the `skips`-th in a row to be skipped, and logs and keeps the report.

    One probe for each row of skipped steps, and not before the last one has become a hundredth of the time. Training
    goes on, also if the step raises: that is logged, and ends automatic probes.

    Args:
        skips: skipped steps in a row.
        step: runs the forward pass on the present batch and returns the loss, as in `probe`.
        run: probes a step at a scale.
        any_rank: returns which of a few flags are set on any of the ranks that share the scale.
        on_report: called with each report. What it raises ends training.
    """

    def __init__(
        self, skips: int, step: Step, run: Run, any_rank: AnyRank, on_report: Callable[[ProbeReport], object]
    ) -> None:
        self._skips = skips
        self._step = step
        self._run = run
        self._any_rank = any_rank
        self._on_report = on_report
        self._probed = False
        self._failed = False
        self._next_s = -math.inf
        self._logged: tuple[Any, ...] = ()
        self._logged_s = -math.inf

    def note(self, skipped: int, result: StepResult) -> None:
        """Probes if enough steps have been skipped. Synchronizes with the device, and costs anything, only then.

        Args:
            skipped: how many steps were skipped in a row, the same on all ranks.
            result: the result of the last step, which on a device may be a few steps later.
        """
        if skipped < self._skips:
            self._probed = False
        elif not (self._probed or self._failed or self._any([time.monotonic() < self._next_s], result)[0]):
            self._probed = True
            self._probe(skipped, result)

    def _probe(self, skipped: int, result: StepResult) -> None:
        errors: list[Exception] = []

        def step() -> Tensor:
            """Returns the loss of the step; NaN if it raises, so that other ranks do not wait for this one."""
            try:
                return check_loss(self._step())
            except Exception as error:
                errors.append(error)
                return torch.full((), math.nan, device=result.scale.device, requires_grad=True)

        report: ProbeReport | None = None
        start_s = time.monotonic()
        try:
            with torch.enable_grad():
                report = self._run(step, float(result.scale))
        except Exception as error:  # whatever the user's step or a kernel raises must not end training
            errors.append(error)
        self._failed = self._any([bool(errors)], result)[0]
        end_s = time.monotonic()
        self._next_s = end_s + (end_s - start_s) * (1 / SHARE - 1)
        if errors:
            logger.warning("The automatic probe is off: its step raised an error.", exc_info=errors[-1])
        if self._failed or report is None:
            return
        finite = report.verdict is Verdict.FINITE
        found_by_first, found = self._any([is_first_rank() and not finite, not finite], result)
        # On a device they may be known late. If this step was applied, the row of them has ended by itself.
        if not found and not result.skipped():
            return
        # Rank 0 logs for all; if its own numbers are finite, those do whose are not.
        if is_first_rank() if found_by_first or not found else not finite:
            self._log(skipped, report)
        self._on_report(report)

    def _any(self, flags: list[bool], result: StepResult) -> list[bool]:
        """Returns which flags are set on any rank. Every rank must call it."""
        return self._any_rank(torch.tensor(flags, device=result.scale.device))

    def _log(self, skipped: int, report: ProbeReport) -> None:
        """Logs a report, unless it says what the last one said a short time ago."""
        operation = report.operation
        found = (report.verdict, None if operation is None else (operation.name, operation.module), report.tensor)
        if found == self._logged and time.monotonic() - self._logged_s < EVERY_S:
            return
        self._logged, self._logged_s = found, time.monotonic()
        short = str(report).partition("\nOperations before it:")[0]
        logger.warning("%d steps in a row were skipped. A probe found: %s", skipped, short)
