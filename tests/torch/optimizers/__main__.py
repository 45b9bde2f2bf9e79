"""Runs optimizers with each scaler and prints the lines of the table in the documentation, as JSON.

    python -m tests.torch.optimizers            # those that are installed
    python -m tests.torch.optimizers --write    # writes the table: `make test-optimizers` has all of them

A process of its own: some of the packages print, and warn of what they use.
"""

import json
import os
import sys
import warnings
from contextlib import redirect_stdout

from tests.torch.optimizers.cases import OTHERS, TORCH
from tests.torch.optimizers.page import PAGE, is_installed, line_of, updated


def main() -> None:
    warnings.simplefilter("ignore")
    cases = [case for case in (*TORCH, *OTHERS) if is_installed(case)]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        lines = [line_of(case) for case in cases]
    if "--write" in sys.argv[1:]:
        PAGE.write_text(updated(PAGE.read_text(), lines))
    print(json.dumps(lines))


main()
