"""What one run of pytest came to, read from its closing line."""

import re
from dataclasses import dataclass
from typing import Literal

Result = Literal["passed", "failed", "not run"]

CLOSING = re.compile(r"\bin \d[\d.]*s\b")
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed)\b")


@dataclass(frozen=True)
class Counts:
    """How many tests passed, were skipped, failed (errors among them), and failed as expected."""

    passed: int = 0
    skipped: int = 0
    failed: int = 0
    xfailed: int = 0


@dataclass(frozen=True)
class Outcome:
    """One line's facts.

    Attributes:
        result: whether it passed; `not run` without an interpreter.
        python: the version of Python, in full where it ran.
        versions: the versions of the modules, as imported.
        counts: of the tests; None if there was no closing line.
        reason: why there are no counts, in a few words.
    """

    result: Result
    python: str
    versions: tuple[str, ...] = ()
    counts: Counts | None = None
    reason: str = ""


def counts_of(output: str) -> Counts | None:
    """Returns the counts of pytest's closing line, the last of its form; None if pytest did not get that far."""
    for line in reversed(output.splitlines()):
        found = COUNT.findall(line)
        if found and CLOSING.search(line):
            by_word = {word.rstrip("s") if word.startswith("error") else word: int(count) for count, word in found}
            return Counts(
                passed=by_word.get("passed", 0),
                skipped=by_word.get("skipped", 0),
                failed=by_word.get("failed", 0) + by_word.get("error", 0) + by_word.get("xpassed", 0),
                xfailed=by_word.get("xfailed", 0),
            )
    return None


def judged(exit_code: int, output: str) -> tuple[Result, Counts | None, str]:
    """Returns the result, the counts and the reason, from pytest's exit code and what it printed.

    A run passes with exit code 0 and at least one test that passed: where all were skipped, nothing was shown.
    """
    counts = counts_of(output)
    if counts is None:
        return "failed", None, f"pytest ended with {exit_code} and no counts"
    if exit_code == 0 and counts.passed and not counts.failed:
        return "passed", counts, ""
    return "failed", counts, ""
