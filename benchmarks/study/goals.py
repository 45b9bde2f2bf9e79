"""The goals of `policy="auto"`, what was measured of each, and the runs that miss it."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.study.results import Rows
from benchmarks.study.rules import BASELINE, FP32_RUN, SUBJECT
from benchmarks.study.tasks import TASKS

Row = dict[str, Any]
Pair = tuple[Row, Row]
Setting = tuple[str, str, bool]
"""A task, a format, and whether gradients are clipped."""

SKIPPED_SHARE = 0.1
FEW_STEPS = 3

LOST_FLOOR = 1e-8
"""Losses of energy below this are below the rounding of FP16 and not compared."""

NOISE = 3.0
"""Standard deviations of FP32's seeds within which a final loss counts as the same."""

SAME = 0.02
"""Share of FP32's loss within which one counts as the same in any case."""


@dataclass(frozen=True)
class Goal:
    """A goal, and how it was met.

    Attributes:
        text: what should be so.
        found: the figure of `auto`.
        baseline: the same of torch's rule, where there is one.
        holds: whether it is so; None if nothing was run that shows it.
        misses: names of the runs, or of the tasks, that miss it.
    """

    text: str
    found: str
    baseline: str
    holds: bool | None
    misses: Sequence[str] = ()


def goals(rows: Rows, held_out: int) -> list[Goal]:
    """Returns the goals by the rows of the tuned tasks, or of a held-out set.

    Those on blocks and on bad batches are left out where the set has no such task.
    """
    pairs, specs = _pairs(rows), [spec for spec in TASKS.values() if spec.held_out == held_out]
    found = [_skips(rows, pairs), _first_scale(pairs), _energy(pairs), _final_loss(rows)]
    found += [_blocks(pairs)] if any(spec.blocks for spec in specs) else []
    found += [_bad_batches(rows)] if any(spec.bad_batches for spec in specs) else []
    return [*found, *_never_worse(rows, pairs)]


def below_one(rows: Rows) -> tuple[int, int]:
    """Returns in how many of torch's runs the scale fell below 1, the lowest of `Dynamic`, and how many there are."""
    found = [row["lowest_scale"] < 0 for row in rows.values() if row["rule"] == BASELINE]
    return sum(found), len(found)


def _skips(rows: Rows, pairs: Sequence[Pair]) -> Goal:
    # Gradients that are not finite in FP32 either are skipped by every rule.
    single = {(row["task"], row["clips"], row["seed"]): row["skipped"] for row in rows.values() if _is_single(row)}

    def avoidable(row: Row) -> int:
        return row["skipped"] - single.get((row["task"], row["clips"], row["seed"]), 0)

    ours, theirs = (sum(avoidable(pair[side]) for pair in pairs) for side in (0, 1))
    holds = ours <= SKIPPED_SHARE * theirs if pairs else None
    # The sum has to be small, not each part of it: runs that skip a smaller share than that do not miss the goal.
    most = [
        f"{name_of(row)}: {avoidable(row)}" for row, other in pairs if avoidable(row) > SKIPPED_SHARE * avoidable(other)
    ]
    share = f" ({ours / theirs:.1%})" if theirs else ""
    text = f"at most {SKIPPED_SHARE:.0%} of torch's skipped steps, in all runs together, without those that FP32 skips"
    return Goal(text, f"{ours}{share}", f"{theirs}", holds, [] if holds else most)


def _first_scale(pairs: Sequence[Pair]) -> Goal:
    late = [(ours, theirs) for ours, theirs in pairs if not _is_early(ours) and _steps(ours) >= _steps(theirs)]
    early = sum(_is_early(theirs) for _, theirs in pairs)
    misses = [f"{_with_steps(ours)} against {steps_text(theirs['steps_to_best'])}" for ours, theirs in late]
    text = f"a good scale within {FEW_STEPS} steps, or before torch has one"
    found, baseline = f"{len(pairs) - len(late)} of {len(pairs)}", f"{early} of {len(pairs)} within {FEW_STEPS}"
    return _each(text, found, baseline, len(pairs), misses)


def _energy(pairs: Sequence[Pair]) -> Goal:
    compared = [(ours, theirs) for ours, theirs in pairs if theirs["lost"] > LOST_FLOOR]
    shares = [(ours["lost"] / theirs["lost"], ours) for ours, theirs in compared]
    misses = [f"{name_of(row)}: {share:.1%}" for share, row in shares if share > 1]
    most = f"at most {max(share for share, _ in shares):.2%}, in {len(shares)} runs" if shares else "no such run"
    text = f"no more energy lost than torch loses, where that is more than {LOST_FLOOR:g}"
    return _each(text, most, "", len(compared), misses)


def _final_loss(rows: Rows) -> Goal:
    ours, theirs = (_against(rows, rule, FP32_RUN) for rule in (SUBJECT, BASELINE))
    found = [f"{sum(map(_is_within, side))} of {len(side)}" for side in (ours, theirs)]
    misses = [each.text for each in ours if not _is_within(each)]
    return _each("final loss within noise of FP32", found[0], found[1], len(ours), misses)


def _blocks(pairs: Sequence[Pair]) -> Goal:
    compared = [pair for pair in pairs if TASKS[pair[0]["task"]].blocks]
    ours, theirs = (f"{sum(pair[side]['skipped'] for pair in compared)}" for side in (0, 1))
    worse = [(row, other) for row, other in compared if row["skipped"] > other["skipped"]]
    misses = [f"{name_of(row)}: {row['skipped']} against {other['skipped']}" for row, other in worse]
    return _each("blocks of tasks: no more skipped steps than torch", ours, theirs, len(compared), misses)


def _bad_batches(rows: Rows) -> Goal:
    against = _against({key: row for key, row in rows.items() if TASKS[row["task"]].bad_batches}, SUBJECT, BASELINE)
    misses = [each.text for each in against if not _is_within(each)]
    text = "bad batches: final loss within noise of torch's, or below it"
    return _each(text, f"{len(against) - len(misses)} of {len(against)}", "", len(against), misses)


def _never_worse(rows: Rows, pairs: Sequence[Pair]) -> Iterator[Goal]:
    """Yields what "never worse than `Dynamic`" means for each measure. Above a scale of 1 that is torch's rule."""

    def worse(text: str, is_worse: Callable[[Row, Row], bool], shown: Callable[[Row], str]) -> Goal:
        found = [(ours, theirs) for ours, theirs in pairs if is_worse(ours, theirs)]
        misses = [f"{name_of(ours)}: {shown(ours)} against {shown(theirs)}" for ours, theirs in found]
        return _each(
            f"never worse than `Dynamic`: {text}", f"worse in {len(found)} of {len(pairs)}", "", len(pairs), misses
        )

    yield worse("skipped steps", lambda a, b: a["skipped"] > b["skipped"], lambda row: f"{row['skipped']}")
    yield worse(
        "steps to a good scale", lambda a, b: _steps(a) > _steps(b), lambda row: steps_text(row["steps_to_best"])
    )
    yield worse(
        f"energy lost, above {LOST_FLOOR:g}",
        lambda a, b: a["lost"] > max(b["lost"], LOST_FLOOR),
        lambda row: f"{row['lost']:.0e}",
    )
    against = _against(rows, SUBJECT, BASELINE)
    misses = [each.text for each in against if not _is_within(each)]
    found = f"worse in {len(misses)} of {len(against)}"
    yield _each("never worse than `Dynamic`: final loss, beyond noise", found, "", len(against), misses)


def _each(text: str, found: str, baseline: str, count: int, misses: Sequence[str]) -> Goal:
    """Returns a goal that each of `count` runs has to meet."""
    return Goal(text, found, baseline, not misses if count else None, misses)


def _pairs(rows: Rows) -> list[Pair]:
    """Returns the runs of `auto` beside the same of torch's rule."""
    theirs = {_run_of(row): row for row in rows.values() if row["rule"] == BASELINE}
    ours = [row for row in rows.values() if row["rule"] == SUBJECT]
    return [(row, theirs[_run_of(row)]) for row in ours if _run_of(row) in theirs]


def _is_single(row: Row) -> bool:
    return row["rule"] == FP32_RUN


def _run_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("task", "format", "clips", "seed", "steps"))


def name_of(row: Row) -> str:
    """Returns the name of a run, without its rule."""
    return f"{_setting_text((row['task'], row['format'], row['clips']))}, seed {row['seed']}"


def _setting_text(setting: Setting) -> str:
    task, format, clips = setting
    return f"{task}, {format}{', clipped' if clips else ''}"


def steps_text(steps: int | None) -> str:
    """Returns the number of steps to a good scale as text."""
    return "never" if steps is None else f"{steps}"


def _steps(row: Row) -> float:
    return float("inf") if row["steps_to_best"] is None else row["steps_to_best"]


def _is_early(row: Row) -> bool:
    return _steps(row) <= FEW_STEPS


def _with_steps(row: Row) -> str:
    return f"{name_of(row)}: {steps_text(row['steps_to_best'])}"


@dataclass(frozen=True)
class Excess:
    """How far the final loss of a rule is above that of another, as means over the seeds that both were run with.

    Attributes:
        setting: of the runs.
        final: of the rule.
        reference: of the other.
        noise: what is within the noise of FP32.
    """

    setting: Setting
    final: float
    reference: float
    noise: float

    @property
    def text(self) -> str:
        """The setting and both losses."""
        return f"{_setting_text(self.setting)}: {self.final:.3f} against {self.reference:.3f}, noise {self.noise:.3f}"


def _is_within(excess: Excess) -> bool:
    return excess.final - excess.reference <= excess.noise


def _against(rows: Rows, rule: str, other: str) -> list[Excess]:
    """Returns the final losses of a rule beside those of another, where there are also runs of FP32, for the noise."""
    settings = dict.fromkeys((row["task"], row["format"], row["clips"]) for row in rows.values() if row["rule"] == rule)
    compared = (_excess(rows, setting, rule, other) for setting in settings)
    return [each for each in compared if each is not None]


def _excess(rows: Rows, setting: Setting, rule: str, other: str) -> Excess | None:
    single, found, beside = (_finals(rows, setting, each) for each in (FP32_RUN, rule, other))
    seeds = found.keys() & beside.keys()
    if not seeds or not single:
        return None
    spread = statistics.stdev(single.values()) if len(single) > 1 else 0.0
    noise = max(NOISE * spread, SAME * abs(statistics.fmean(single.values())))
    final, reference = (statistics.fmean(side[seed] for seed in seeds) for side in (found, beside))
    return Excess(setting, final, reference, noise)


def _finals(rows: Rows, setting: Setting, rule: str) -> dict[int, float]:
    """Returns the final loss of each seed. Runs of FP32 have no other format."""
    task, format, clips = setting
    wanted = (task, "fp32" if rule == FP32_RUN else format, clips, rule)
    found = [row for row in rows.values() if (row["task"], row["format"], row["clips"], row["rule"]) == wanted]
    return {row["seed"]: row["final"] for row in found}
