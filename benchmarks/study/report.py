"""The tables of the study, and whether the goals were met."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.study.goals import Goal, below_one, goals, steps_text
from benchmarks.study.plan import FORMATS, source
from benchmarks.study.results import Rows
from benchmarks.study.rules import BASELINE, FP32_RUN, RULES, SUBJECT
from benchmarks.study.tasks import SETS, TASKS
from benchmarks.study.training import Case

Row = dict[str, Any]


def section(rows: Rows, held_out: int) -> str:
    """Returns the goals and the tables of the tuned tasks, or of a held-out set, under a heading, as markdown."""
    chosen = {key: row for key, row in rows.items() if TASKS[row["task"]].held_out == held_out}
    heading = f"## {list(SETS.values())[held_out]}"
    return "\n\n".join(part for part in (heading, claims(chosen, held_out), tables(chosen)) if part)


def tables(rows: Rows) -> str:
    """Returns a table for each format, with and without clipping, as markdown."""
    parts = [_table(rows, format, clips) for clips in (False, True) for format in FORMATS]
    return "\n\n".join(part for part in parts if part)


def claims(rows: Rows, held_out: int) -> str:
    """Returns each goal, what was measured of it and whether it holds, and below them what misses one, as markdown."""
    found = goals(rows, held_out)
    lines = ["| goal | `auto` | `torch` | holds |", "|---|---|---|---|"]
    lines += [f"| {goal.text} | {goal.found} | {goal.baseline} | {_verdict(goal)} |" for goal in found]
    below, count = below_one(rows)
    fell = f"fell below in {below} of {count} runs" if below else "never fell below"
    lines += ["", f"`Dynamic` has torch's rule and a lowest scale of 1; torch's scale {fell}."]
    missed = [goal for goal in found if goal.misses]
    lines += ["", "What misses a goal:", ""] if missed else []
    for goal in missed:
        lines += [f"- {goal.text}:", *(f"    - {miss}" for miss in goal.misses)]
    return "\n".join(lines)


def coverage(rows: Rows, planned: Sequence[Case]) -> str:
    """Returns a sentence on how much of the study has been run."""
    own = sum(source(case) == case for case in planned if case.key in rows)
    clipped = [row["clips"] for row in rows.values() if row["rule"] == SUBJECT]
    return (
        f"{len(rows)} of {len(planned)} rows of the full form have been made, by {own} runs: "
        f"{len(rows) - own} are the same run as another. "
        f"Of `{SUBJECT}`, {clipped.count(False)} are without clipping, and {clipped.count(True)} with."
    )


def _verdict(goal: Goal) -> str:
    return "not run" if goal.holds is None else "yes" if goal.holds else "**no**"


def _table(rows: Rows, format: str, clips: bool) -> str:
    formats = (format, "fp32")
    chosen = [row for row in rows.values() if row["format"] in formats and row["clips"] == clips]
    rules = [rule for rule in RULES if any(row["rule"] == rule for row in chosen)]
    if BASELINE not in rules or SUBJECT not in rules:
        return ""
    lines = [f"### {format}, {'with' if clips else 'without'} clipping", ""]
    lines += [f"| task | seeds | steps | {' | '.join(rules)} |", f"|---|---|---|{'---|' * len(rules)}"]
    for task in TASKS:
        of_task = [row for row in chosen if row["task"] == task]
        seeds = _seeds(of_task, BASELINE) & _seeds(of_task, SUBJECT)
        if seeds:
            cells = [_cell([r for r in of_task if r["rule"] == rule and r["seed"] in seeds], seeds) for rule in rules]
            shown = ", ".join(map(str, sorted(seeds)))
            lines.append(f"| {task} | {shown} | {of_task[0]['steps']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _seeds(rows: Sequence[Row], rule: str) -> set[int]:
    return {row["seed"] for row in rows if row["rule"] == rule}


def _cell(rows: Sequence[Row], seeds: set[int]) -> str:
    """Returns skips, steps to the best scale, energy lost and final loss, as means over seeds."""
    if len(rows) < len(seeds):
        return "not run"
    final = f"{statistics.fmean(row['final'] for row in rows):.3f}"
    if rows[0]["rule"] == FP32_RUN:
        return final
    skips = statistics.fmean(row["skipped"] for row in rows)
    found = [row["steps_to_best"] for row in rows]
    reached = steps_text(None if None in found else max(found))
    lost = statistics.fmean(row["lost"] for row in rows)
    return f"{skips:.3g} / {reached} / {lost:.0e} / {final}"
