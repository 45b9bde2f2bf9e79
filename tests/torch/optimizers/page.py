"""The table of optimizers in the documentation."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from tests.torch.optimizers.cases import Case
from tests.torch.optimizers.comparison import KINDS, Outcome, compared

PAGE = Path(__file__).parents[3] / "docs/reference/optimizers.md"
BEGIN = "<!-- written by `python -m tests.torch.optimizers --write` from here -->"
END = "<!-- to here -->"
HEAD = (
    "| optimizer | package | `LossScaler` | drop-in `GradScaler` | torch's `GradScaler` |",
    "|---|---|---|---|---|",
)


def is_installed(case: Case) -> bool:
    """Returns whether the package of a case is there, and in a version that has the optimizer."""
    try:
        return version(case.package) is not None and (case.package != "torch" or hasattr(torch.optim, case.name))
    except PackageNotFoundError:
        return False


def line_of(case: Case) -> str:
    """Returns the line of an optimizer, after running it with every scaler."""
    number = version(case.package).partition("+")[0]
    cells = (f"`{case.name}`", f"{case.package} {number}", *(_shown(compared(case, kind)) for kind in KINDS))
    return f"| {' | '.join(cells)} |"


def _shown(outcome: Outcome) -> str:
    if outcome.refused:
        return f"refuses it: `{outcome.refused}`"
    faults = [] if outcome.held else ["**a skip changes it**"]
    faults += [] if outcome.exact else ["**other bits**"]
    return ", ".join(faults) or "holds, bit-exact"


def lines_in(page: str) -> list[str]:
    """Returns the lines of the table."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    return [line for line in table.splitlines() if line.startswith("| `")]


def updated(page: str, lines: Sequence[str]) -> str:
    """Returns the page with these lines in its table."""
    before, _, rest = page.partition(BEGIN)
    return before + "\n".join([BEGIN, "", *HEAD, *lines, "", END]) + rest.partition(END)[2]
