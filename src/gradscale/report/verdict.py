"""What a run shows, in sentences: the condition it ended in, and what happened on the way."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradscale._text import number_text
from gradscale.engine import health as of_runs
from gradscale.engine.health import CALIBRATION_STEPS, HEALTHY, Condition, health_of
from gradscale.engine.result import Status
from gradscale.policies.static import CheckOnly
from gradscale.report.what_if import Evidence, own_policies, predict

if TYPE_CHECKING:
    from gradscale.recording.reader import Run

RECENT = 1000
"""Steps at the end of a run that its condition is judged by."""

GROWTH = {"loss": (1.3, 5.0), "norm": (4.0, math.inf)}
"""Growth over its lowest level that is taken for a divergence: in a run that broke down, and in one that did not.

A bad batch or an overflow of the forward pass comes at the level that the loss had. A level is a median of `WINDOW`
steps, whose noise is below 10% even with batches of 4 sequences."""

WINDOW = 10

BEFORE = 100
"""Applied steps before a run broke down, in which its cause is looked for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a run shows.

    Attributes:
        level: `"fault"` needs a change, `"event"` is worth a look, `"fine"` is normal.
        title: what it is.
        text: what to do about it, or why nothing.
        rows: of the steps that show it.
    """

    level: Literal["fault", "event", "fine"]
    title: str
    text: str
    rows: tuple[int, ...] = ()


def findings(run: "Run") -> list[Finding]:
    """Returns what a run shows, the most serious first. The first is the verdict."""
    if not len(run):
        return [Finding("event", "no steps", "The record has a header and no step yet.")]
    bad_loss = run.status == Status.NONFINITE_LOSS.value
    rows = np.flatnonzero(run.skipped)
    applied = np.flatnonzero(run.applied)
    last_applied = int(applied[-1]) if applied.size else -1
    at_start = int(np.argmax(np.append(_applied(run) >= CALIBRATION_STEPS, True)))
    diverged = _diverged(run, last_applied)
    on_the_way = rows[rows <= (diverged.rows[0] if diverged else last_applied)]
    early = on_the_way[(on_the_way < at_start) & ~bad_loss[on_the_way]]
    batches = on_the_way[bad_loss[on_the_way]]
    later = on_the_way[(on_the_way >= at_start) & ~bad_loss[on_the_way]]
    found = [diverged or _condition(run, at_start, last_applied)]
    if batches.size:
        found.append(_batches(run, batches))
    if early.size:
        title = f"normal start-up: {_count(early.size, 'skip')} while the scale is found"
        text = "Nothing to do." + " To lose no batch, use `backward(loss, retries=8)`." * bool(run.parts)
        found.append(Finding("fine", title, text, _rows(early)))
    if later.size:
        rate = later.size / (run.step[-1] - run.step[0] + 1)
        title = f"{_count(later.size, 'overflow')} after the start, {rate:.2%} of all steps"
        text = "Each was skipped and lowered the scale. A dynamic scale finds its limit by crossing it."
        found.append(Finding("fine", title, text, _rows(later)))
    return sorted(found, key=lambda one: ("fault", "event", "fine").index(one.level))


def _applied(run: "Run") -> Any:
    """Returns how many steps were applied up to each. A log of another system leaves out most of those that were."""
    return run.step - run.step[0] + 1 - np.cumsum(~run.applied)


def _condition(run: "Run", start: int, last_applied: int) -> Finding:
    """Returns the condition that the run ended in, as the scaler itself would have reported it."""
    last, streak = len(run) - 1, len(run) - 1 - last_applied
    begin = max(start if start < len(run) else 0, len(run) - RECENT)  # all of a run that is still at its start
    counts = _applied(run), np.cumsum(run.skipped)
    applied, skipped = (int(each[-1]) for each in counts)
    before = [int(each[begin - 1]) if begin else 0 for each in counts]
    with np.errstate(divide="ignore"):
        headroom = (Evidence(run).best - np.log2(run.scale))[begin:]
    known = headroom[np.isfinite(headroom)]
    saved = own_policies(run)
    policy = saved[max(saved)].policy if saved else None
    if policy is None:  # a log of another system: the last overflows did not lower the scale, or lowered it often
        stuck = streak > 9 or (streak > 2 and len(set(run.scale[-3:].tolist())) == 1)
    else:
        stuck = predict(run, [policy])[0].stuck
    # As the scaler counts them: skips of losses that were not finite, and rows of skips that began with an overflow.
    bad, fresh = run.status == Status.NONFINITE_LOSS.value, run.skipped & ~np.append(False, run.skipped[:-1])
    health = health_of(
        of_runs.Evidence(
            scale=float(run.scale[last]),
            applied=applied,
            skipped=skipped,
            consecutive_skips=streak,
            stuck=stuck,
            recent=(applied - before[0], skipped - before[1]),
            bad_losses=int(bad[begin:].sum()),
            rows=int((fresh & ~bad)[begin:].sum()),
            status=Status(run.status[last]),
            headroom_bits=float(np.median(known)) if known.size else float("nan"),
            culprits=run.culprits.get(last, ()),
            parameters=len({each.name for one in run.watch.values() for each in one if each.kind == "weight_grad"}),
            scaling=policy is None or bool(policy.needs),
            multiplies=bool((run.scale != 1).any()) if policy is None else not isinstance(policy, CheckOnly),
        )
    )
    if health.condition in HEALTHY:
        return Finding("fine", f"{health.condition}: {health.applied} updates in {health.steps} steps", health.advice)
    fixed = health.condition in (Condition.NONFINITE_LOSS, Condition.STUCK)
    title = health.condition.value.replace("_", " ") + ": no scale helps" * (fixed and run.status[last] != "no_grads")
    return Finding(
        "fault", title, health.advice, _rows(range(last_applied + 1, len(run)) or np.flatnonzero(run.skipped))
    )


def _diverged(run: "Run", last_applied: int) -> Finding | None:
    """Returns that the learning rate is too high, where loss or norm had grown before the run ended or broke down."""
    broken = len(run) - 1 - last_applied > 1
    for name, column in (("loss", run.loss), ("norm", run.norm)):
        rows = np.flatnonzero(run.applied & np.isfinite(column) & (column > 0))
        if rows.size <= WINDOW:
            continue
        levels = np.median(np.lib.stride_tricks.sliding_window_view(column[rows], WINDOW), axis=1)
        lowest = np.minimum(np.minimum.accumulate(levels), column[rows[0]])
        high = levels > GROWTH[name][not broken] * lowest
        if not (high[-BEFORE:].any() if broken else high[-1]):
            continue
        first = int(high.argmax()) if broken else len(high) - int((~high[::-1]).argmax())
        top = int(levels[first:].argmax()) + first
        rates = [values[rows[first]] for key, values in run.notes.items() if key.lower() in ("lr", "learning_rate")]
        rate = f" ({rates[0]:g})" if rates and np.isfinite(rates[0]) else ""
        ended = f", and no step after {run.step[last_applied]} was applied" if broken else ""
        again = f"restart from a checkpoint before step {run.step[rows[first]]}" if rows[first] else "start again"
        text = (
            f"The learning rate{rate} is too high: the {name} rose from {lowest[first]:.3g} to {levels[top]:.3g} by "
            f"step {run.step[rows[top + WINDOW - 1]]}{ended}. No scale helps. Lower the learning rate or warm it up, "
            f"and {again}."
        )
        shown = (int(rows[first]), int(rows[top + WINDOW - 1]), *range(last_applied + 1, len(run)))
        return Finding("fault", "learning rate: the run diverged", text, shown)
    return None


def _batches(run: "Run", rows: Any) -> Finding:
    """Returns that the loss of single steps was not finite, and later ones were applied."""
    named = ", ".join(str(run.step[row]) for row in rows[:5]) + (", ..." if rows.size > 5 else "")
    culprits = {each.name: None for row in rows for each in run.culprits.get(int(row), ())}
    first = f" Non-finite parameters: {', '.join(list(culprits)[:3])}." if culprits else ""
    text = (
        f"At {'step' if rows.size == 1 else 'steps'} {named} the loss was inf or NaN, and later steps were applied: "
        f"look at these batches, and at the forward pass. The update was skipped, and no scale helps.{first}"
    )
    return Finding(
        "event",
        f"forward overflow: {_count(rows.size, 'batch', 'batches')} with a non-finite loss",
        text,
        _rows(rows),
    )


def _rows(rows: Any) -> tuple[int, ...]:
    return tuple(map(int, rows))


def _count(count: Any, noun: str, plural: str = "") -> str:
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def numbers(run: "Run") -> dict[str, str]:
    """Returns what a table of a run has, by its title."""
    rate = f" ({run.skipped.sum() / max(1, len(run)):.2%})"
    known = np.isfinite(run.scale)
    scales = run.scale[known]
    header, saved = run.parts[-1][1] if run.parts else None, own_policies(run)
    return {
        "steps": f"{len(run):,}",
        "skipped": f"{int(run.skipped.sum()):,}{rate}",
        "scale": "" if not scales.size else " to ".join(number_text(float(each)) for each in (scales[0], scales[-1])),
        "policy": "" if header is None else repr(saved[max(saved)].policy) if saved else str(header.policy.get("kind")),
        "format": run.format,
        "made by": ""
        if header is None
        else f"gradscale {header.gradscale}, {header.framework} {header.framework_version}",
    }
