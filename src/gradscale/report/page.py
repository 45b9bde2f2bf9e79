"""The report of runs as one HTML file that needs nothing else, and its parts."""

import html
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np

from gradscale._extras import require
from gradscale.peers.specs import as_policy
from gradscale.report.figures import Figure, heat_map, lost_by_layer, timeline
from gradscale.report.verdict import findings, numbers
from gradscale.report.what_if import own_policies, predict

if TYPE_CHECKING:
    from gradscale.recording.reader import Run

OTHERS = ("auto", "dynamic", "dynamic:growth_interval=200", "static:65536")
"""Policies that a report compares a run with."""

TEMPLATE = Path(__file__).with_name("page.html")


def figure(made: Figure) -> Any:
    """Returns plotly's own object of a figure, for a notebook."""
    require("A figure of a run", "plotly", extra="report")
    from plotly.graph_objects import Figure as PlotlyFigure

    return PlotlyFigure(made)


def report(runs: "Sequence[Run]") -> str:
    """Returns the report of runs as HTML. What is compared is drawn together, the rest for each run."""
    require("A report", "plotly", extra="report")
    from plotly.offline import get_plotlyjs

    figures: dict[str, Figure] = {}

    def drawn(title: str, about: str, made: Figure | None) -> str:
        if made is None:
            return ""
        key = f"figure{len(figures)}"
        figures[key] = made
        return _section(title, f'<p class="soft">{about}</p><div class="figure" id="{key}"></div>')

    body = [_section("", summary(run)) for run in runs]
    body.append(
        drawn(
            "Scale, loss and skips", "Each point on the scale is a skipped step, with its parameters.", timeline(runs)
        )
    )
    for run in runs:
        name = f": {html.escape(run.name)}" if len(runs) > 1 else ""
        about = (
            "Gradients of parameters, times the scale. Bars: what each format can hold; dotted: the ends of "
            f"{run.format}. Left of them gradients become zero, right of them a step overflows."
        )
        body.append(drawn(f"Layers and exponents{name}", about, heat_map(run)))
        about = f"Share of nonzero gradient elements that became zero in {run.format}, over the sampled steps."
        body.append(drawn(f"Lost by layer{name}", about, lost_by_layer(run)))
        body.append(_section(f"What other policies would have done{name}", what_if(run)))
    for other in runs[1:]:
        compared = html.escape(f"{runs[0].name} and {other.name}: {parted(runs[0], other)}")
        body.append(_section("Where the runs part", f"<p>{compared}</p>"))
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=f"gradscale: {html.escape(', '.join(run.name for run in runs))}",
        body="\n".join(body),
        plotly=get_plotlyjs(),
        # No name can end the script.
        figures=json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    )


def summary(run: "Run") -> str:
    """Returns the verdict on a run and its numbers as HTML."""
    found = "".join(
        f'<div class="finding {one.level}"><h3>{html.escape(one.title)}</h3><p>{prose(one.text)}</p></div>'
        for one in findings(run)
    )
    rows = [(title, f"<code>{html.escape(value)}</code>") for title, value in numbers(run).items() if value]
    return f"<h1>{html.escape(run.name)}</h1>{found}{_table((), rows)}"


def prose(text: str) -> str:
    """Returns a text as HTML, with what is between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def what_if(run: "Run", others: Sequence[str] = OTHERS) -> str:
    """Returns a table of what policies would have done, that of the run first."""
    rows: list[tuple[str, ...]] = []
    named = {f"{saved.policy!r} (this run)": saved.policy for saved in list(own_policies(run).values())[:1]}
    for name, policy in {**named, **{name: as_policy(name) for name in others}}.items():
        title = f"<code>{html.escape(name)}</code>"
        try:
            rows.append((title, *cells(predict(run, [policy])[0])))
        except ValueError as error:
            rows.append((f"{title}: {prose(str(error))}",))
    note = (
        "The gradients are taken as they were. A step that overflowed at a scale may be clean at a lower one: where "
        "the record does not say, it is undecided. Bits: how far the scale was below the highest that fits."
    )
    return f'<p class="soft">{note}</p>{_table(("policy", *COLUMNS), rows)}'


COLUMNS = ("skipped", "undecided", "bits below", "lost")


def cells(found: Any) -> tuple[str, ...]:
    """Returns a prediction as the cells of a row, under `COLUMNS`."""
    bits, lost = found.bits_below, found.share_lost
    return (
        f"{int(found.skipped.sum()):,}",
        f"{int(found.undecided.sum()):,}",
        "" if np.isnan(bits) else f"{bits:.1f}",
        "" if np.isnan(lost) else f"{lost:.2%}",
    )


def parted(first: "Run", second: "Run") -> str:
    """Returns, as a sentence, the first step where two runs differ in scale, status or loss."""
    steps, ours, theirs = np.intersect1d(first.step, second.step, return_indices=True)
    columns = {
        "status": (first.status[ours], second.status[theirs]),
        "scale": (first.scale[ours], second.scale[theirs]),
        "loss": (first.loss[ours], second.loss[theirs]),
    }
    where = {}
    for name, (left, right) in columns.items():
        both = np.ones(len(steps), bool) if name == "status" else ~(np.isnan(left) | np.isnan(right))
        if (different := np.flatnonzero(both & (left != right))).size:
            where[name] = int(different[0])
    if not where:
        return f"The runs have the same scale, status and loss in all of the {len(steps):,} steps that both have."
    name = min(where, key=lambda key: where[key])
    left, right = (f"{side[where[name]]}" for side in columns[name])
    later = ", ".join(f"{key} at step {steps[row]}" for key, row in where.items() if key != name)
    return f"They part at step {steps[where[name]]}: the {name} is {left} and {right}." + (
        f" Then: {later}." if later else ""
    )


def _section(title: str, content: str) -> str:
    return f"<section>{f'<h2>{title}</h2>' if title else ''}{content}</section>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table as HTML. With a heading, all columns but the first hold numbers."""
    head = f"<tr><th>{'<th>'.join(columns)}</tr>" if columns else ""
    body = "".join(f"<tr><td>{'<td>'.join(row)}</tr>" for row in rows)
    return f'<div class="table"><table class="{"numbers" if columns else ""}">{head}{body}</table></div>'
