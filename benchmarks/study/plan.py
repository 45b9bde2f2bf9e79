"""Which cases are run, and in which order: first those that the claims are about."""

from collections.abc import Iterator, Sequence
from itertools import product

from benchmarks.study.rules import BASELINE, FP32_RUN, RULES, SUBJECT
from benchmarks.study.tasks import TASKS
from benchmarks.study.training import Case

FORMATS = ("fp16", "fp8_e5m2")
SEEDS = (0, 1, 2)
QUICK_STEPS = 200


def cases(quick: bool) -> Iterator[Case]:
    """Yields the cases. The quick form has one seed, fewer steps and no clipping."""
    compared = (BASELINE, SUBJECT)
    others = tuple(rule for rule in RULES if rule not in (FP32_RUN, *compared))
    clips = (False,) if quick else (False, True)
    for rules, clip in [(rules, clip) for clip in clips for rules in ((FP32_RUN,), compared)]:
        yield from _cases(rules, clip, quick)
    for clip in clips:
        yield from _cases(others, clip, quick)


def _cases(rules: Sequence[str], clip: bool, quick: bool) -> Iterator[Case]:
    """Yields the cases of some rules, so that also half of them compare the rules of a task."""
    formats = ("fp32",) if rules == (FP32_RUN,) else FORMATS
    short_first = sorted(TASKS, key=lambda name: TASKS[name].steps)
    for seed, format, task, rule in product(SEEDS[:1] if quick else SEEDS, formats, short_first, rules):
        steps = TASKS[task].steps
        yield Case(task, rule, format, clip, seed, min(steps, QUICK_STEPS) if quick else steps)
