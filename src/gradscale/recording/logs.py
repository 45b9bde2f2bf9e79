"""Runs of other systems, read from what they leave behind: logs, and files of metrics."""

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gradscale._extras import require
from gradscale.engine.result import Status
from gradscale.recording.form import Step
from gradscale.recording.reader import Run, read_run, run_of
from gradscale.recording.writer import START

NAMES = {
    "scale": re.compile(r"(loss|grad)[ _/]?scale|(.*/)?scale"),
    "norm": re.compile(r"(.*/)?(global_)?(grad[ _]?norm|gnorm)(_step)?"),
    "lr": re.compile(r"(.*/)?(learning[ _]rate|lr(-.*)?)"),
    "loss": re.compile(r"(.*/)?(train_|lm[ _])?loss(_step)?"),
}
"""What trainers and systems call a number."""

STEP = re.compile(r"(global_)?step|iteration|num_updates")
SKIPPED = "number of skipped iterations"
NUMBER = r"[-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf)"

PAIR = re.compile(rf"([A-Za-z_][\w/ -]*?)[\"']?(?: *[=:] *| +)[\"'\[]?({NUMBER})(?=[\s,|\"'\]}}/]|$)", re.IGNORECASE)
"""A number with its name, in the forms of DeepSpeed, Megatron, fairseq and Transformers: `name=1`, `name: 1`,
`| name 1 |`, `"name": "1"`."""

OVERFLOW = re.compile(
    rf"overflow.*?(?:attempt\w+ loss scale: *(?P<at>{NUMBER})|(?:setting|reducing) loss scale to:? *(?P<to>{NUMBER}))",
    re.IGNORECASE,
)
"""A skipped step, in the lines of DeepSpeed, and of fairseq and apex, which name only the scale after it."""

REDUCED = re.compile(rf"reducing to (?P<to>{NUMBER})")


def read_any(path: str | Path) -> Run:
    """Returns a run from a record, or from what another system wrote; its steps have what is known of them.

    Read are `trainer_state.json` of Transformers, event files of TensorBoard, `metrics.csv` of Lightning, and lines of
    DeepSpeed, Megatron, fairseq and apex in any log.

    Raises:
        OSError: the file cannot be read.
        ValueError: nothing of the kind is in it.
        MissingExtra: it is an event file, and tensorboard is not installed.
    """
    path = Path(path)
    if path.is_dir() or "tfevents" in path.name:
        return _of_rows(_events(path), path)
    text = path.read_text(encoding="utf-8", errors="replace")
    if text.startswith(START.decode()):
        return read_run(path)
    if path.suffix == ".csv":
        return _of_rows(_merged(csv.DictReader(text.splitlines())), path)
    if path.suffix == ".json":
        return _of_rows(_merged(json.loads(text).get("log_history", ())), path)
    return _of_lines(text.splitlines(), path)


def _events(path: Path) -> dict[int, dict[str, float]]:
    require("An event file", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    rows: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            rows.setdefault(event.step, {})[tag] = event.value
    return rows


def _merged(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Returns the numbers of rows by their step; trainers write several for one."""
    merged: dict[int, dict[str, float]] = {}
    for row in rows:
        numbers = {name: float(value) for name, value in row.items() if re.fullmatch(NUMBER, str(value), re.IGNORECASE)}
        if "step" in numbers:
            merged.setdefault(int(numbers.pop("step")), {}).update(numbers)
    return merged


def _of_rows(rows: Mapping[int, Mapping[str, float]], path: Path) -> Run:
    return _checked([_step(number, known) for number in sorted(rows) if (known := _known(rows[number]))], path)


def _of_lines(lines: Iterable[str], path: Path) -> Run:
    """Returns the steps of a log in its order. Overflows have no number in it: they follow the step before."""
    steps: list[Step] = []
    shown: dict[int, str] = {}
    scale, skips_counted = math.nan, True
    for place, line in enumerate(lines, 1):
        found = OVERFLOW.search(line)
        pairs = {name.strip().lower(): float(value) for name, value in PAIR.findall(line)}
        count = next((int(value) for name, value in pairs.items() if STEP.fullmatch(name)), None)
        if found:
            after = found["to"] or ((again := REDUCED.search(line)) and again["to"])
            at = float(found["at"] or 2 * float(found["to"]))
            scale = float(after) if after else at
            number = steps[-1].step + 1 if steps else 0
            steps.append(Step(step=number, scale=at, status=Status.OVERFLOW))
        elif known := _known(pairs):
            skips_counted = skips_counted and "num_updates" not in pairs
            past = sum(each.status is not Status.APPLIED for each in steps) if not skips_counted else 0
            number = max((count or 0) + past, steps[-1].step + 1 if steps else 0)
            skipped, after = pairs.get(SKIPPED, 0) > 0, known.get("scale", scale)
            at = after if not skipped or math.isnan(scale) else scale  # Megatron's lines have the scale after the step
            read = _step(number, known | {"scale": at}, skipped)
            scale = after
            steps.append(read)
        else:
            continue
        shown[len(steps) - 1] = f"{place}: {line.strip()[:300]}"
    return _checked(steps, path, lines=shown)


def _known(numbers: Mapping[str, float]) -> dict[str, float]:
    """Returns those numbers that are known by a name; the first of several."""
    known: dict[str, float] = {}
    for name, value in numbers.items():
        for kind, pattern in NAMES.items():
            if pattern.fullmatch(name):
                known.setdefault(kind, value)
    return known


def _step(number: int, known: Mapping[str, float], skipped: bool = False) -> Step:
    status = Status.APPLIED
    if skipped or not math.isfinite(known.get("norm", 0)):
        status = Status.OVERFLOW
    if not math.isfinite(known.get("loss", 0)):
        status = Status.NONFINITE_LOSS
    note = {name: known[name] for name in ("loss", "lr") if name in known}
    return Step(step=number, scale=known.get("scale", math.nan), status=status, norm=known.get("norm"), note=note)


def _checked(steps: list[Step], path: Path, **more: Any) -> Run:
    if not steps:
        raise ValueError(
            "A run is read from a record, `trainer_state.json`, `metrics.csv`, an event file, or a log of DeepSpeed, "
            f"Megatron, fairseq or apex. Received: {path}, in which no step is found."
        )
    return run_of(steps, str(path), **more)
