"""Which cases there are, in which order they are run, and which of them are the same run."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product

from benchmarks.study.results import Rows
from benchmarks.study.rules import BASELINE, FP32_RUN, RULES, SUBJECT
from benchmarks.study.tasks import SETS, TASKS
from benchmarks.study.training import Case

from gradscale.formats import get_format

FORMATS = ("fp16", "fp8_e5m2")
SEEDS = (0, 1, 2)
QUICK_STEPS = 200


def cases(quick: bool) -> Iterator[Case]:
    """Yields the cases, first those that the claims are about: of the tuned tasks, then of each held-out set.

    Held-out tasks have no other. The quick form has one seed, fewer steps and no clipping.
    """
    clips = (False,) if quick else (False, True)
    tuned, *held_out = ([name for name in TASKS if TASKS[name].held_out == which] for which in range(len(SETS)))
    for clip in clips:
        yield from _cases(tuned, (FP32_RUN,), ("fp32",), clip, quick)
        yield from _cases(tuned, (BASELINE, SUBJECT), FORMATS, clip, quick)
    for tasks in held_out:
        for clip in clips:
            yield from _cases(tasks, (FP32_RUN,), ("fp32",), clip, quick)
        for format, clip in product(FORMATS, clips):
            yield from _cases(tasks, (BASELINE, SUBJECT), (format,), clip, quick)
    for rule in RULES:
        if rule not in (FP32_RUN, BASELINE, SUBJECT):
            for clip in clips:
                yield from _cases(tuned, (rule,), FORMATS, clip, quick)


def source(case: Case) -> Case:
    """Returns the case whose run is also that of `case`: most often itself.

    A task that says where to start differs from the same task without only for a policy that would start elsewhere.
    """
    spec, rule, format = TASKS[case.task], RULES[case.rule], get_format(case.format)
    if spec.init_scale is None or rule.for_run(format, spec.init_scale) != rule.for_run(format, None):
        return case
    usual = replace(spec, init_scale=None)
    return replace(case, task=next(name for name, other in TASKS.items() if other == usual))


def completed(rows: Rows, planned: Iterable[Case]) -> Rows:
    """Returns the rows of the planned cases that have been run, each with its own task where the run was another's."""
    found = ((case, source(case).key) for case in planned)
    return {case.key: rows[key] | asdict(case) for case, key in found if key in rows}


def _cases(
    tasks: Sequence[str], rules: Sequence[str], formats: Sequence[str], clip: bool, quick: bool
) -> Iterator[Case]:
    """Yields the cases of some rules, so that also half of them compare the rules of a task."""
    short_first = sorted(tasks, key=lambda name: TASKS[name].steps)
    for seed, format, task, rule in product(SEEDS[:1] if quick else SEEDS, formats, short_first, rules):
        steps = TASKS[task].steps
        yield Case(task, rule, format, clip, seed, min(steps, QUICK_STEPS) if quick else steps)
