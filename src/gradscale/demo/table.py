"""The table: how the runs ended."""

import math
from collections.abc import Sequence

import numpy as np
from rich import box
from rich.table import Table

from gradscale.demo.train import Run

CAPTION = "accuracy, loss: of the classifier; lost: share of gradients that became zero"

LAST_STEPS = 20
"""Steps that a final loss is averaged over."""


def make_table(runs: Sequence[Run]) -> Table:
    """Returns a table with a row for each run."""
    table = Table(box=box.SIMPLE_HEAD, caption=CAPTION, caption_justify="left")
    table.add_column("run", no_wrap=True)
    for heading in ("accuracy", "loss", "pixel error", "lost", "skipped", "scale"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run.way.name,
            f"{run.accuracy:.1%}",
            f"{np.mean(run.losses[-LAST_STEPS:]):.3f}",
            f"{run.error:.4f}",
            f"{np.mean(run.lost):.1%}",
            f"{len(run.skipped)}",
            f"2^{math.log2(run.scales[-1]):.0f}",
        )
    return table
