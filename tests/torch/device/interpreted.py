"""Runs the kernels of every rule with Triton's interpreter, beside numpy.

In a process of its own, since Triton decides when it is imported whether it interprets: TRITON_INTERPRET=1 python -m
tests.torch.device.interpreted. Prints as JSON, for each rule, how many states differ from numpy's, and of how many.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from tests.torch.device.rules import POLICIES, Numbers, differ, expected, floats, numbers, states, variants

from gradscale.engine.packed import BLOCK, Packed
from gradscale.kernels.triton import functions, packet, packets
from gradscale.kernels.triton.kernel import jitted, launch
from gradscale.policies.arithmetic import pow2_floor

ROWS, FIRST, END, COLUMNS = 1024, 150, 300, 304  # a norm of more numbers than a block has


def compared(packed: Packed, clip_norm: float, generator: np.random.Generator) -> int:
    """Returns how many of `ROWS` states the kernel advances to others than numpy does."""
    before, found = states(packed, ROWS, generator), numbers(ROWS, COLUMNS, generator)
    after = torch.zeros(before.shape, dtype=torch.int32)
    state, read = torch.from_numpy(before.copy()), torch.from_numpy(found.copy())
    launch(jitted(packed), state, read, after, FIRST, END, clip_norm, ROWS)
    wanted = expected(packed, before, found, FIRST, END, clip_norm)
    return int(differ(packed, after.numpy(), wanted).any(axis=1).sum())


@triton.jit
def each_function(inputs, outputs, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    x = tl.load(inputs + at)
    tl.store(outputs + at, functions.floor(x))
    tl.store(outputs + COUNT + at, functions.pow2_floor(x))
    tl.store(outputs + 2 * COUNT + at, functions.isfinite(x).to(tl.float32))


def functions_that_differ(generator: np.random.Generator) -> list[int]:
    """Returns for how many numbers `floor`, `pow2_floor` and `isfinite` have other bits than numpy's."""
    x: Numbers = floats(2**14, generator) * np.float32(generator.choice([-1, 1], 2**14))
    x[: 2**13] = np.clip(np.round(x[: 2**13] * 4), -9e6, 9e6) / 4  # near whole numbers, and whole ones
    x[:6] = np.array([np.nan, np.inf, -np.inf, -0.0, 2.0**-149, -(2.0**-149)], np.float32)
    found = torch.zeros(3, len(x))
    each_function[(1,)](torch.from_numpy(x), found, COUNT=tl.constexpr(len(x)))
    powers = np.where(np.isfinite(x), pow2_floor(np.minimum(x, np.float32(2.0**126)), np), np.float32(np.nan))
    wanted = np.stack([np.floor(x), powers, np.isfinite(x).astype(np.float32)])
    ours = found.numpy()
    same = (ours.view(np.int32) == wanted.view(np.int32)) | (np.isnan(ours) & np.isnan(wanted))
    return (~same).sum(axis=1).tolist()


def packets_that_differ(generator: np.random.Generator) -> int:
    """Returns how many of 200 packets the kernels write or read otherwise than numpy, whose sums have another order."""
    different = 0
    for trial in range(200):
        count, share = int(generator.integers(1, 300)), trial % 4 == 0
        sizes = floats(2 * count, generator)
        first = count if trial % 3 else 0
        end = first + (count if trial % 2 == 0 or not first else 0)
        losses, shares = floats(2, generator), np.full(int(share), 0.25, np.float32)
        read = torch.from_numpy(np.concatenate([sizes[:end], losses, shares]))
        if trial % 5 == 1:
            read[int(generator.integers(0, end + 2))] = (np.inf, np.nan, -np.inf)[trial % 3]
        weights = torch.from_numpy(generator.random((2, first)))
        scale = torch.tensor(2.0 ** int(generator.integers(-10, 20)))
        elements, flags = 1000.0 * share, [1.0, float(end > first), 0.25]
        ours, amax = torch.zeros(len(packet.At), dtype=torch.float64), torch.zeros(())
        theirs = packet.write_packet(scale, read, weights, first, end, elements, flags)
        written = scale, read, weights, ours, amax, first, end, len(read) - share, elements, *flags
        run: Any = packets.write[(1,)]
        run(*written, BLOCK=BLOCK)
        same = torch.allclose(ours, theirs[0], rtol=1e-12, atol=0) and torch.equal(amax, theirs[1])
        received = theirs[0] * 2
        received[packet.At.BOUNDS] *= 1.5 if trial % 11 == 5 else 1.0
        received[packet.At.SCALE] *= 1.5 if trial % 7 == 5 else 1.0  # the scales of two ranks that differ
        asked, tolerances = [first > 0, end > first, share], [1e-6, 1e-4]
        expected = packet.read_packet(scale, received, theirs[1], 2, tolerances, asked)
        found = torch.zeros(len(expected))
        run = packets.read[(1,)]
        run(
            scale,
            received,
            theirs[1],
            found,
            2,
            *tolerances,
            **dict(zip(("NORM", "PEAK", "SHARE"), asked, strict=True)),
        )
        different += not (same and torch.allclose(found, expected, rtol=1e-6, atol=0))
    return different


def main() -> None:
    generator, results = np.random.default_rng(0), {}
    with np.errstate(all="ignore"):
        for name, policy in POLICIES.items():
            different = [
                compared(packed, clip_norm, generator) for packed in variants(policy) for clip_norm in (1.0, 0.3)
            ]
            results[name] = sum(different), ROWS * len(different)
        results["packets"] = packets_that_differ(generator), 200
        results["functions"] = functions_that_differ(generator)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
