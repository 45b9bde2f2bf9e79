"""Run as a program: reads each file of a folder in a process with little memory, and prints what came of it.

A file's name is that of the system, a hyphen and anything else. A line of JSON for each: its name, the error's type and
the error, or nothing if it was read.
"""

import json
import sys
from pathlib import Path

from tests.peers.limits import limit_this_process

from gradscale.peers import import_state


def outcome(system: str, data: bytes) -> list[str]:
    try:
        import_state(system, data)
    except ValueError as error:
        return ["ValueError", str(error)]
    return []


if __name__ == "__main__":
    files = sorted(Path(sys.argv[1]).iterdir())
    limit_this_process(beyond=max(file.stat().st_size for file in files))
    for file in files:
        print(json.dumps([file.name, *outcome(file.name.partition("-")[0], file.read_bytes())]), flush=True)
