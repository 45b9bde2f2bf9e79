"""What the choice of a policy costs: the predictive one against the plain one, and no scaling against no scaler.

Claim:    a step under `Headroom` takes at most 1.10 of the time of one under `Dynamic`, with clipping and without.
          Under `NoScaling` it takes at most 1.01 of a plain `optimizer.step()`.
Baseline: the same `LossScaler` with `Dynamic`; for `NoScaling` and `Static` the optimizer's own step.
Machine:  printed with the results; two CPU threads.
Command:  python -m benchmarks.bench_torch_policies [--quick]
Caveats:  a scaler measures some things once in sixteen steps, so sixteen steps in a row count as one here: the time
          compared is theirs together. `Static` has no goal: it checks for overflow, which a plain step does not. No
          backward pass is timed. No GPU was measured.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean

from benchmarks.alone import run_alone
from benchmarks.cases import CLIP, QUICK_SHARE, adamw_fused, large_case, timed
from benchmarks.rows import Row, compared
from benchmarks.sides import SCALE, Case, bare, loss_scaler
from benchmarks.turns import Side

from gradscale import NoScaling, Static
from gradscale.policies.headroom import Headroom
from gradscale.torch.step.result import SAMPLE_EVERY

PREDICTIVE_GOAL, OFF_GOAL = 1.10, 1.01
FEWEST = 2 * SAMPLE_EVERY
DYNAMIC, HEADROOM, STATIC, OFF, BARE = "Dynamic", "Headroom", "Static", "NoScaling", "optimizer.step()"


def predictive_sides(case: Case) -> dict[str, Side]:
    """Returns the scaler under the plain and under the predictive policy."""
    return {DYNAMIC: loss_scaler(case), HEADROOM: loss_scaler(case, Headroom())}


def constant_sides(case: Case) -> dict[str, Side]:
    """Returns the plain step, and the scaler under the policies that never move the scale."""
    return {BARE: bare(case), STATIC: loss_scaler(case, Static(SCALE)), OFF: loss_scaler(case, NoScaling())}


def in_blocks(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Returns the mean seconds of a step over each block of turns in which a scaler measures everything once."""
    blocks = range(len(next(iter(seconds.values()))) // SAMPLE_EVERY)
    return {
        name: [fmean(turns[block * SAMPLE_EVERY : (block + 1) * SAMPLE_EVERY]) for block in blocks]
        for name, turns in seconds.items()
    }


def rows(quick: bool) -> list[Row]:
    """Returns a row for each policy and case."""
    tensors, repeats = (160 // QUICK_SHARE, FEWEST) if quick else (160, 6 * SAMPLE_EVERY)
    found: list[Row] = []
    for clip in (CLIP, None):
        case = large_case("AdamW fused", adamw_fused, clip, tensors)
        seconds = in_blocks(timed(partial(predictive_sides, case), repeats, quick, FEWEST))
        found.append(_row(HEADROOM, case, DYNAMIC, seconds, PREDICTIVE_GOAL))
    case = large_case("AdamW fused", adamw_fused, None, tensors)
    seconds = in_blocks(timed(partial(constant_sides, case), repeats, quick, FEWEST))
    found.append(_row(OFF, case, BARE, seconds, OFF_GOAL))
    found.append(_row(STATIC, case, BARE, seconds, None))
    return found


def _row(name: str, case: Case, baseline: str, seconds: Mapping[str, Sequence[float]], goal: float | None) -> Row:
    return compared(f"{name}: {case.name}", baseline, seconds[name], seconds[baseline], goal)


if __name__ == "__main__":
    run_alone("What a policy costs", rows)
