"""The tables of the study, and whether the goals were met."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.study.plan import FORMATS
from benchmarks.study.results import Rows
from benchmarks.study.rules import BASELINE, FP32_RUN, RULES, SUBJECT
from benchmarks.study.tasks import TASKS

Row = dict[str, Any]

FEW_STEPS = 3
LOST_FLOOR = 1e-8
"""Losses of energy below this are below the rounding of FP16 and not compared."""

NOISE = 3.0
"""Standard deviations of FP32's seeds within which a final loss counts as the same."""

SAME = 0.02
"""Share of FP32's loss within which one counts as the same in any case."""


def tables(rows: Rows) -> str:
    """Returns a table for each format, with and without clipping, as markdown."""
    parts = [_table(rows, format, clips) for clips in (False, True) for format in FORMATS]
    return "\n\n".join(part for part in parts if part)


def claims(rows: Rows) -> str:
    """Returns the goals and what was measured of each, as markdown."""
    pairs = _pairs(rows)
    skips, baseline_skips = (sum(row["skipped"] for row in side) for side in zip(*pairs, strict=True))
    worse = [ours for ours, theirs in pairs if ours["skipped"] > theirs["skipped"]]
    quick = [ours for ours, _ in pairs if ours["steps_to_best"] is not None and ours["steps_to_best"] <= FEW_STEPS]
    also_quick = [row for _, row in pairs if row["steps_to_best"] is not None and row["steps_to_best"] <= FEW_STEPS]
    lost = [(ours["lost"], theirs["lost"]) for ours, theirs in pairs if theirs["lost"] > LOST_FLOOR]
    most = max((a / b for a, b in lost), default=0.0)
    far = [name for name in _final_names(rows) if not _within_noise(rows, *name, SUBJECT)]
    far_baseline = [name for name in _final_names(rows) if not _within_noise(rows, *name, BASELINE)]
    lines = [
        ("steps skipped", "at most 10%", f"{skips} against {baseline_skips}: {skips / max(baseline_skips, 1):.1%}"),
        ("runs with more skips than torch", "none", _listed(worse, len(pairs))),
        (
            f"runs within 2 bits of the best scale in {FEW_STEPS} steps",
            "all",
            f"{len(quick)} of {len(pairs)} (torch: {len(also_quick)})",
        ),
        ("energy lost, where torch loses more than 1e-8", "at most 20%", f"at most {most:.2%}, in {len(lost)} runs"),
        ("final loss within noise of FP32", "all", f"{_outside(far, rows)} (torch: {_outside(far_baseline, rows)})"),
    ]
    head = ["| | goal | `auto` |", "|---|---|---|"]
    return "\n".join([*head, *(f"| {what} | {goal} | {found} |" for what, goal, found in lines)])


def coverage(rows: Rows, planned: int) -> str:
    """Returns a sentence on how much of the study has been run."""
    seeds = {format: sorted({row["seed"] for row in rows.values() if row["format"] == format}) for format in FORMATS}
    known = "; ".join(f"{format}: seeds {', '.join(map(str, found)) or 'none'}" for format, found in seeds.items())
    return f"{len(rows)} of {planned} runs of the full form have been made ({known})."


def _pairs(rows: Rows) -> list[tuple[Row, Row]]:
    """Returns the runs of `auto` beside the same of torch's rule."""
    found = [row for row in rows.values() if row["rule"] == SUBJECT]
    pairs = ((row, _same(rows, row, BASELINE)) for row in found)
    return [(ours, theirs) for ours, theirs in pairs if theirs is not None]


def _same(rows: Rows, row: Row, rule: str) -> Row | None:
    names = ("task", "format", "clips", "seed", "steps")
    return next((r for r in rows.values() if r["rule"] == rule and all(r[name] == row[name] for name in names)), None)


def _table(rows: Rows, format: str, clips: bool) -> str:
    formats = (format, "fp32")
    chosen = [row for row in rows.values() if row["format"] in formats and row["clips"] == clips]
    rules = [rule for rule in RULES if any(row["rule"] == rule for row in chosen)]
    if rules in ([], [FP32_RUN]):
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
    reached = "never" if None in found else f"{max(found)}"
    lost = statistics.fmean(row["lost"] for row in rows)
    return f"{skips:.3g} / {reached} / {lost:.0e} / {final}"


def _final_names(rows: Rows) -> list[tuple[str, str, bool]]:
    return sorted({(row["task"], row["format"], row["clips"]) for row in rows.values() if row["rule"] == SUBJECT})


def _finals(rows: Rows, task: str, format: str, clips: bool, rule: str) -> dict[int, float]:
    """Returns the final loss of each seed."""
    names = (task, format, clips, rule)
    found = [row for row in rows.values() if (row["task"], row["format"], row["clips"], row["rule"]) == names]
    return {row["seed"]: row["final"] for row in found}


def _within_noise(rows: Rows, task: str, format: str, clips: bool, rule: str) -> bool:
    """Returns whether the final loss is no further above that of FP32 than the seeds of FP32 are from each other."""
    single = _finals(rows, task, "fp32", clips, FP32_RUN)
    found = _finals(rows, task, format, clips, rule)
    pairs = [(final, single[seed]) for seed, final in found.items() if seed in single]
    if not pairs:
        return True
    excess = statistics.fmean(final - reference for final, reference in pairs)
    spread = statistics.stdev(single.values()) if len(single) > 1 else 0.0
    return excess <= max(NOISE * spread, SAME * abs(statistics.fmean(single.values())))


def _listed(worse: Sequence[Row], count: int) -> str:
    names = ", ".join(f"{row['task']} ({row['format']}, seed {row['seed']})" for row in worse)
    return f"{len(worse)} of {count}" + (f": {names}" if names else "")


def _outside(far: Sequence[tuple[str, str, bool]], rows: Rows) -> str:
    total = len(_final_names(rows))
    names = ", ".join(f"{task} ({format})" for task, format, _ in far)
    return f"{total - len(far)} of {total}" + (f"; not {names}" if names else "")
