"""The record of a run: one JSON object a step, with a header that says which rule made it."""

from gradscale.recording.logs import read_any
from gradscale.recording.reader import Run, read_run

__all__ = ["Run", "read_any", "read_run"]
