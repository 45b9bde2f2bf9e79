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
    first = (FP32_RUN, BASELINE, SUBJECT)
    yield from _cases(first, quick)
    yield from _cases(tuple(rule for rule in RULES if rule not in first), quick)


def _cases(rules: Sequence[str], quick: bool) -> Iterator[Case]:
    seeds, clips = (SEEDS[:1], (False,)) if quick else (SEEDS, (False, True))
    # Short tasks first, and the rules of a task one after the other, so that also half a study compares them.
    tasks = sorted(TASKS, key=lambda name: TASKS[name].steps)
    for seed, clip, format, task, rule in product(seeds, clips, ("fp32", *FORMATS), tasks, rules):
        if (rule == FP32_RUN) == (format == "fp32"):
            steps = TASKS[task].steps
            yield Case(task, rule, format, clip, seed, min(steps, QUICK_STEPS) if quick else steps)
