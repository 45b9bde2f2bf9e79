"""How often a step reads and writes the gradients and synchronizes with the device, and the memory it takes.

Claim:    beyond what the optimizer's own step does, the gradients are read once and written once, and once more read
          when an optimizer that is not fused clips them. The host reads nothing with a fused optimizer, and one flag
          with another. No more than 1% of the gradients' bytes is allocated.
Baseline: torch's `GradScaler`, called in torch's order.
Machine:  any; nothing is timed.
Command:  python -m benchmarks.bench_torch_traffic [--quick]
Caveats:  counted operator by operator, by what its schema says it reads and writes; see `benchmarks.traffic`. What
          a kernel allocates inside is not seen. What the optimizer's step does alone, unscaled and not clipped, is
          taken off both sides: `foreach` optimizers read the host and make temporaries as large as the gradients.
"""

from dataclasses import dataclass, replace

from benchmarks.alone import run_alone
from benchmarks.cases import CLIP, QUICK_SHARE, MakeOptimizer, adamw_foreach, adamw_fused, large_case
from benchmarks.rows import Row
from benchmarks.sides import bare, grad_scaler, loss_scaler
from benchmarks.traffic import Traffic, count

TORCH = "torch GradScaler"


@dataclass(frozen=True)
class Budget:
    """What a scaler may add to a step.

    Attributes:
        optimizer: its name.
        make: makes it.
        clip: bound on the norm, or None.
        reads: passes that read the gradients.
        writes: passes that write them.
        host_reads: how often the host may synchronize with the device.
    """

    optimizer: str
    make: MakeOptimizer
    clip: float | None
    reads: int
    writes: int
    host_reads: int


BUDGETS = (
    Budget("AdamW fused", adamw_fused, CLIP, reads=1, writes=1, host_reads=0),
    Budget("AdamW fused", adamw_fused, None, reads=1, writes=1, host_reads=0),
    Budget("AdamW foreach", adamw_foreach, CLIP, reads=2, writes=1, host_reads=1),
    Budget("AdamW foreach", adamw_foreach, None, reads=1, writes=1, host_reads=1),
)
MEMORY = 1.0
"""Percent of the gradients' bytes that may be allocated."""


def counted(budget: Budget, tensors: int) -> list[Row]:
    """Returns what a scaler adds to one step, beside what torch's adds."""
    case = large_case(budget.optimizer, budget.make, budget.clip, tensors)
    alone = figures(count(bare(replace(case, clip=None))))
    goals = (budget.reads, budget.writes, budget.host_reads, MEMORY)
    found = zip(
        FIGURES, figures(count(loss_scaler(case))), figures(count(grad_scaler(case))), alone, goals, strict=True
    )
    return [
        Row(f"{name}: {case.name}", TORCH, ours - own, goal, unit, baseline_measured=torchs - own)
        for (name, unit), ours, torchs, own, goal in found
    ]


FIGURES = (
    ("gradients read", "passes"),
    ("gradients written", "passes"),
    ("host reads", "reads"),
    ("peak memory", "% of gradients"),
)


def figures(traffic: Traffic) -> tuple[float, float, float, float]:
    """Returns what was counted, in the order of `FIGURES`."""
    memory = 100 * traffic.peak_allocated / traffic.gradient_bytes
    return traffic.passes_read, traffic.passes_written, len(traffic.host_reads), memory


def rows(quick: bool) -> list[Row]:
    """Returns four rows for each budget."""
    tensors = 160 // QUICK_SHARE if quick else 160
    return [row for budget in BUDGETS for row in counted(budget, tensors)]


if __name__ == "__main__":
    run_alone("What a scaler adds to a step", rows)
