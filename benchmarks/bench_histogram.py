"""Claim: an exponent histogram of float32 is counted at 1 GB/s or more on one core, in torch and in compiled JAX.

Baselines: numpy's reference, which uses `frexp`; `torch.histc` of log2, which knows neither zeros nor NaN; and a plain
read of the memory, by `torch.aminmax`. All take turns in one process, on one thread, over the same 8M gradients; a
tenth of them is zero. Throughput is the size of the tensor over the median time.

    python -m benchmarks.bench_histogram

Caveats: the numbers are Gaussian. torch reads a chunk with subnormal numbers, inf or NaN once more: with such numbers
in every chunk, the goal may be missed.
"""

import os

# Before JAX is loaded: it has no other way to be given one thread.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import statistics
from functools import partial

import jax
import torch
from benchmarks.alone import run_alone
from benchmarks.rows import Row
from benchmarks.timing import timed
from benchmarks.turns import Side

from gradscale import histogram
from gradscale.jax.histogram import exponent_histogram as jax_histogram
from gradscale.torch.histogram import block_histogram, exponent_histogram

ELEMENTS = 8_000_000
QUICK_ELEMENTS = 1_000_000
GOALS = {"torch": 1.0, "JAX": 1.0}


def sides(elements: int) -> dict[str, Side]:
    """Returns all ways to count, over one tensor."""
    gradients = torch.randn(elements, generator=torch.Generator().manual_seed(0)).mul_(1e-4)
    gradients[::10] = 0
    half, array, compiled = gradients.half(), jax.numpy.asarray(gradients.numpy()), jax.jit(jax_histogram)
    runs = {
        "torch": lambda: exponent_histogram(gradients),
        "torch, FP16": lambda: exponent_histogram(half),
        "torch, blocks of 32": lambda: block_histogram(gradients, 32),
        "JAX": lambda: jax.block_until_ready(compiled(array)),
        "numpy": lambda: histogram.exponent_histogram(gradients.numpy()),
        "histc of log2": lambda: torch.histc(gradients.abs().log2_(), 277, -149, 128),
        "read": lambda: torch.aminmax(gradients),
    }
    return {name: Side(run) for name, run in runs.items()}


def rows(quick: bool) -> list[Row]:
    """Returns the throughput of each, beside the two baselines."""
    elements = QUICK_ELEMENTS if quick else ELEMENTS
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = timed(partial(sides, elements), 5 if quick else 15, quick)
    finally:
        torch.set_num_threads(threads)
    speed = {name: _bytes(name, elements) / statistics.median(taken) / 1e9 for name, taken in seconds.items()}
    baselines = ("numpy", "histc of log2", "read")
    return [
        Row(f"histogram: {name}", base, speed[name], GOALS.get(name), "GB/s", True, baseline_measured=speed[base])
        for name in speed
        if name not in baselines
        for base in baselines
    ]


def _bytes(name: str, elements: int) -> int:
    return elements * (2 if "FP16" in name else 4)


if __name__ == "__main__":
    run_alone("Exponent histograms", rows)
