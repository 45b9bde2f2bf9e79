"""Run as a program: damages the files of a folder and reads them, in a process with little memory.

Arguments: the folder, a seed, and how many. Prints a line for each file that neither was read nor ended in a clear
error, with the file itself, and at the end how many there were of each kind.
"""

import sys
from collections import Counter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from tests.peers.damage import damaged_file
from tests.peers.limits import limit_this_process

from gradscale import Dynamic, replay
from gradscale.engine.saved import read_file
from gradscale.peers import import_state
from gradscale.policies.contract import ScaleState

CLEAR = ("Received", "is not valid JSON", "no such key", "Missing", "is empty", "must be UTF-8")


def read(reader: str, data: bytes, folder: str) -> Any:
    """Reads a file as its name says, and returns the state in it."""
    if reader not in ("saved", "replay"):
        return import_state(reader, data)[1]
    path = Path(folder) / "file"
    path.write_bytes(data)
    if reader == "saved":
        return read_file(path).state
    from gradscale.cli._sequences import read_sequences  # here, as only the files to replay need the command line

    try:
        sequences: dict[str, Any] = {**read_sequences(str(path), None)}
        return replay([Dynamic(growth_interval=2)], **sequences).states()[0]
    except TypeError as error:  # which the command line reports as it does a `ValueError`
        raise ValueError(str(error)) from error


def outcome(reader: str, data: bytes, folder: str) -> str:
    """Returns "read", "refused", or what was wrong."""
    try:
        state = read(reader, data, folder)
    except ValueError as error:
        message = str(error)
        return "refused" if len(message) < 2000 and _clear(message) else f"unclear: {message[:300]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return "read" if isinstance(state, ScaleState) and state.scale >= 0 else f"read as {state}"


def _clear(message: str) -> bool:
    """Whether a message is one of ours, which name what is wrong, and not of Python's."""
    return any(words in message for words in CLEAR)


if __name__ == "__main__":
    files = sorted(Path(sys.argv[1]).iterdir())
    random, count = Random(int(sys.argv[2])), int(sys.argv[3])
    by_reader: dict[str, list[bytes]] = {}
    for file in files:
        by_reader.setdefault(file.name.partition("-")[0], []).append(file.read_bytes())
    limit_this_process(beyond=0)
    counts: Counter[str] = Counter()
    with TemporaryDirectory() as folder:
        for _ in range(count):
            reader = random.choice(list(by_reader))
            data = damaged_file(random, by_reader[reader])
            found = outcome(reader, data, folder)
            counts[found if found in ("read", "refused") else "wrong"] += 1
            if found not in ("read", "refused"):
                print(reader, data, found, flush=True)
    print(dict(counts))
