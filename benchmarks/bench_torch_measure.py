"""One read of the gradients that says whether they are finite and how large, against the fastest read there is.

Claim:    `measure` takes at most 1.20 of the time of one flat `torch.dot` over the same memory, for 25M parameters in
          160 tensors and for 100M in 400.
Baseline: one `torch.dot` over the buffer that all gradients are views of: one call, two threads, nothing but reading.
Machine:  printed with the results; two CPU threads.
Command:  python -m benchmarks.bench_torch_measure [--quick]
Caveats:  a plain loop of `torch.dot` over the tensors is shown beside it. It is the limit of what torch's kernels can
          do one tensor at a time, and what `measure` adds to it is its own cost. No GPU was measured.
"""

from functools import partial

import torch
from benchmarks.alone import run_alone
from benchmarks.cases import QUICK_SHARE, timed
from benchmarks.rows import Row, compared
from benchmarks.turns import Side

from gradscale.torch.step.measure import measure_sizes

GOAL = 1.20
FLAT, EACH, OURS = "one flat dot", "a dot for each tensor", "measure"
SIZES = ((160, 156_250), (400, 250_000))
"""How many tensors, and how large: 25M and 100M parameters."""


def sides(tensors: int, elements: int) -> dict[str, Side]:
    """Returns the ways to read gradients that are views of one buffer."""
    flat = torch.randn(tensors * elements, generator=torch.Generator().manual_seed(0))
    gradients = list(flat.view(tensors, elements))
    return {
        FLAT: Side(lambda: torch.dot(flat, flat)),
        EACH: Side(lambda: [torch.dot(gradient, gradient) for gradient in gradients]),
        OURS: Side(lambda: measure_sizes(gradients, flat.device, norm=True, amax=False)),
    }


def rows(quick: bool) -> list[Row]:
    """Returns two rows for each size: `measure`, and the plain loop."""
    found: list[Row] = []
    for full, elements in SIZES:
        tensors = full // QUICK_SHARE if quick else full
        seconds = timed(partial(sides, tensors, elements), 10 if quick else 100, quick)
        size = f"{tensors * elements / 1e6:g}M in {tensors}"
        found.append(compared(f"{OURS}: {size}", FLAT, seconds[OURS], seconds[FLAT], GOAL))
        found.append(compared(f"{EACH}: {size}", FLAT, seconds[EACH], seconds[FLAT]))
    return found


if __name__ == "__main__":
    run_alone("One read of the gradients", rows)
