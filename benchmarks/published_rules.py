"""Counts what the rules of published systems skip, on the synthetic streams of `bench_headroom.py`.

Claim:    none; the table on the page `docs/understand/research.md`.
Baseline: gradscale's default, `Headroom`.
Machine:  any; the counts do not depend on it.
Command:  python -m benchmarks.published_rules [--quick]
Caveats:  those of `bench_headroom.py`. Each rule runs with its system's own defaults, bounds included: where a stream
          needs a scale outside of them, the rule cannot follow. PopART never skips; its skips are steps with an
          infinite gradient.
"""

import argparse

import numpy as np
from benchmarks.alone import QUICK
from benchmarks.bench_headroom import counts, length, markdown

from gradscale import Policy
from gradscale.peers import preset
from gradscale.policies.headroom import Headroom

RULES: dict[str, Policy] = {
    "torch": preset("torch"),
    "OpenSeq2Seq Backoff": preset("openseq2seq", "Backoff"),
    "OpenSeq2Seq LogMax": preset("openseq2seq", "LogMax"),
    "PopART": preset("popart", enabled=True, lossScaling=2.0**15),
    "Chainer": preset("chainer"),
    "Headroom": Headroom(),
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Skips and scales of published rules on synthetic streams")
    parser.add_argument("--quick", action="store_true", help=QUICK)
    steps, runs = length(parser.parse_args().quick)
    print(f"{steps} steps, mean of {runs} runs: skips / steps more than 10 bits too low / median of bits too low\n")
    with np.errstate(over="ignore"):
        print(markdown({name: counts(rule, steps, runs) for name, rule in RULES.items()}))


if __name__ == "__main__":
    main()
