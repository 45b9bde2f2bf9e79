"""The table: the final metrics of the runs."""

import math

import numpy as np
from rich import box
from rich.table import Table

from gradscale.demo.run import Comparison, Run

LOST = "lost: share of gradients that became zero"

LAST_STEPS = 20
"""Steps that a final loss is averaged over."""


def make_table(comparison: Comparison) -> Table:
    """Returns a table with a row for each run."""
    subject = comparison.subject
    first, *others = subject.scores
    caption = f"{subject.caption}; {LOST}"
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    table.add_column(subject.model, no_wrap=True)
    for heading in (first, "loss", *others, "lost", "skipped", "scale"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in comparison.runs:
        score, *further = (f"{run.scores[name]:{spec}}" for name, spec in subject.scores.items())
        loss = f"{final_loss(run):.3f}"
        lost = "-" if math.isnan(run.share_lost()) else f"{run.share_lost():.1%}"
        scale = f"2^{math.log2(run.scales[-1]):.0f}"
        table.add_row(run.recipe, score, loss, *further, lost, f"{len(run.skipped)}", scale)
    return table


def final_loss(run: Run) -> float:
    """Returns the mean loss of the last steps."""
    return float(np.mean(run.losses[-LAST_STEPS:]))
