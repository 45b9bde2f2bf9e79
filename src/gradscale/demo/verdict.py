"""The verdict: what the runs show, in a few sentences whose figures are those of the runs."""

import math
from collections.abc import Sequence

from gradscale.demo.run import Comparison, Run

UNLEARNED = 0.1
"""Share of FP32's progress below which a run has not learned."""


def verdict(comparison: Comparison) -> str:
    """Returns which runs failed, which match FP32 within seed noise, and which overflowed and went on.

    Seed noise is the range of FP32's first score over its seeds. A run matches FP32 if it differs from FP32 with the
    same seed by no more than that.
    """
    reference, *others = comparison.runs
    score, spec = next(iter(comparison.subject.scores.items()))
    start, end = comparison.untrained[score], reference.scores[score]
    seeds = [end, *(scores[score] for scores in comparison.other_seeds.values())]
    noise = max(seeds) - min(seeds)
    shown = f"FP32's {score} is {min(seeds):{spec}} to {max(seeds):{spec}} over {len(seeds)} seeds"
    if not abs(end - start) > noise:
        return f"Too few steps to tell: {shown}, and {start:{spec}} before training."
    sentences = [_failure(run, score, (run.scores[score] - start) / (end - start)) for run in others if _unscaled(run)]
    scaled = [run for run in others if not _unscaled(run)]
    alike = [run for run in scaled if abs(run.scores[score] - end) <= noise]
    if alike:
        verb = "matches" if len(alike) == 1 else "match"
        furthest = max(abs(run.scores[score] - end) for run in alike)
        sentences.append(
            f"{_listed(alike)} {verb} FP32 within seed noise "
            f"(off by at most {_difference(furthest, spec)}, where {shown})."
        )
    else:
        sentences.append(f"{shown}.")
    sentences += [
        f"{run.recipe} ends at {run.scores[score]:{spec}}, further from FP32 than its seeds are from each other."
        for run in scaled
        if run not in alike
    ]
    sentences += [_overflows(run) for run in others if run.skipped]
    return " ".join(sentences)


def _unscaled(run: Run) -> bool:
    return run.recipe.endswith("unscaled")


def _failure(run: Run, score: str, progress: float) -> str:
    learned = "did not learn" if progress < UNLEARNED else f"made {progress:.0%} of FP32's progress in {score}"
    return f"{run.recipe} lost {run.share_lost():.0%} of its gradients and {learned}."


def _overflows(run: Run) -> str:
    """Returns how often a run overflowed, and the highest and lowest scale at which it did."""
    scales = [run.scales[step] for step in run.skipped]
    highest, lowest = _power(max(scales)), _power(min(scales))
    if len(scales) == 1:
        return f"{run.recipe} skipped a step that overflowed, at a scale of {highest}, and went on at a lower one."
    return (
        f"{run.recipe} skipped {len(scales)} steps that overflowed, at scales from {highest} down to {lowest}, "
        "and went on at lower ones."
    )


def _difference(value: float, spec: str) -> str:
    """Returns the difference of two scores. That of two percentages is in points, as 4% may also be 4% of a score."""
    return f"{100 * value:{spec[:-1]}f} points" if spec.endswith("%") else f"{value:{spec}}"


def _listed(runs: Sequence[Run]) -> str:
    names = [run.recipe for run in runs]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _power(scale: float) -> str:
    return f"2^{math.log2(scale):.0f}"
