"""`python -m tests.torch.fuzz 17` runs the program of seed 17; `1000 2000` runs those of a range."""

import sys

import torch
from tests.torch.fuzz.draw import draw
from tests.torch.fuzz.run import report


def main() -> None:
    torch.set_num_threads(1)
    first, *rest = map(int, sys.argv[1:])
    if not rest:
        print(draw(first))
    failed = 0
    for seed in range(first, rest[0] if rest else first + 1):
        if found := report(seed):
            failed += 1
            print(found, end="\n\n", flush=True)
    sys.exit(f"{failed} failed" if failed else None)


if __name__ == "__main__":
    main()
