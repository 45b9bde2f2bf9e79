"""One line in the log about the health of a run, when it changes, and seldom while it does not."""

import logging
import time

from gradscale.engine.health import Condition, Health

logger = logging.getLogger(__name__)

EVERY_S = 600.0
"""Seconds between two lines about the same condition."""

HEALTHY = (Condition.OK, Condition.CALIBRATING)


class HealthLog:
    """Logs the health of a run once when its condition changes, and again after `EVERY_S` if it is not healthy."""

    def __init__(self) -> None:
        self._logged = Condition.OK
        self._at_s = -EVERY_S

    def note(self, health: Health) -> None:
        """Logs a line about `health`, unless it would repeat the last one."""
        healthy = health.condition in HEALTHY
        due = not healthy and time.monotonic() - self._at_s >= EVERY_S
        if health.condition is self._logged and not due:
            return
        self._logged, self._at_s = health.condition, time.monotonic()
        logger.log(logging.INFO if healthy else logging.WARNING, "%s", health)
