"""`gradscale report`, `tune` and `explain-log`: what recorded runs, and logs of other systems, show."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from gradscale.cli._console import as_text, console, table, usage_errors
from gradscale.policies.contract import Policy
from gradscale.record import plain
from gradscale.recording.logs import read_any
from gradscale.recording.reader import Run
from gradscale.report.page import COLUMNS, cells
from gradscale.report.page import report as report_of
from gradscale.report.tune import Candidate, front
from gradscale.report.tune import tune as tuned
from gradscale.report.verdict import Finding, findings
from gradscale.report.what_if import Prediction, own_policies, predict

Runs = Annotated[
    list[str],
    typer.Argument(help="Records; or trainer_state.json, metrics.csv, event files, logs.", metavar="RUN..."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def report(
    runs: Runs,
    out: Annotated[str, typer.Option("--out", "-o", help="The HTML file to write.")] = "report.html",
    as_json: Json = False,
) -> None:
    """Write the report of runs: one HTML file, which opens offline. Prints the verdicts."""
    with usage_errors():
        read = [read_any(path) for path in runs]
        Path(out).write_text(report_of(read), encoding="utf-8")
    found = {run.name: findings(run) for run in read}
    if as_json:
        shown = {name: list(map(_as_json, each)) for name, each in found.items()}
        print(json.dumps({"report": out, "findings": shown}))
        return
    for name, each in found.items():
        console().print(as_text(f"{name}: {each[0].title}. {each[0].text}"))
    console().print(f"report: {as_text(out)}", soft_wrap=True)


def explain_log(
    log: Annotated[str, typer.Argument(help="A log of DeepSpeed, Megatron, fairseq or apex; or what `report` reads.")],
    as_json: Json = False,
) -> None:
    """Say what the skipped steps in a log mean, with the lines that show it."""
    with usage_errors():
        run = read_any(log)
        found = findings(run)
    if as_json:
        print(json.dumps(list(map(_as_json, found))))
        return
    screen = console()
    for one in found:
        screen.print(f"[bold]{as_text(one.title)}[/bold]: {as_text(one.text)}")
        shown = [run.lines.get(row, f"step {run.step[row]}: {run.status[row]}") for row in one.rows]
        for line in shown[:3]:
            screen.print(f"  {as_text(line)}", soft_wrap=True)
        if len(shown) > 3:
            screen.print(f"  and {len(shown) - 3:,} more")


def tune(
    runs: Runs,
    candidates: Annotated[int, typer.Option(min=10, help="How many policies to try.")] = 2000,
    as_json: Json = False,
) -> None:
    """Find settings that would have served recorded runs best: skipped steps against gradients left at zero."""
    with usage_errors():
        tried = tuned([read_any(path) for path in runs], candidates)
    chosen = front(tried)
    if as_json:
        print(json.dumps({"best": _as_json(tried[0]), "front": list(map(_as_json, chosen))}))
        return
    rows = table("policy", "skipped", "lost", "bits below")
    for each in [tried[0], *(each for each in chosen if each is not tried[0])][:8]:
        lost = "" if each.lost != each.lost else f"{each.lost:.3%}"
        rows.add_row(as_text(repr(each.policy)), f"{each.skipped:.3%}", lost, f"{each.bits_below:.2f}")
    screen = console()
    screen.print(rows)
    screen.print(f"Of {len(tried):,} policies tried. The first has the least skipped and lost together:")
    screen.print(f"scaler = LossScaler(model, policy={as_text(repr(tried[0].policy))})", soft_wrap=True)


def show_predictions(run: Run, named: Mapping[str, Policy], as_json: bool) -> None:
    """Prints what policies would have done in a run, that of the run first; all of it with `as_json`."""
    own = {f"{saved.policy!r} (this run)": saved.policy for saved in list(own_policies(run).values())[:1]}
    named = {**own, **named}
    predictions = predict(run, list(named.values()))
    if as_json:
        print(json.dumps([{**_as_json(each), "policy": name} for name, each in zip(named, predictions, strict=True)]))
        return
    rows = table("policy", *COLUMNS)
    for name, each in zip(named, predictions, strict=True):
        rows.add_row(as_text(name.replace(",", ", ").replace(",  ", ", ")), *cells(each))
    screen = console()
    screen.print(f"{len(run):,} steps", rows)
    screen.print(
        "skipped: steps. undecided: steps of which the record does not say whether they overflow at that scale. bits "
        "below: how far the scale was below the highest that fits. lost: gradient elements that became zero."
    )


def _as_json(found: Finding | Candidate | Prediction) -> dict[str, Any]:
    """Returns a result as JSON can hold it, with its policy as text."""
    values = {one.name: getattr(found, one.name) for one in fields(found)}
    return {name: repr(value) if name == "policy" else plain(value) for name, value in values.items()}
