"""A saved scaler in a JSON file, which is not trusted."""

import json
from pathlib import Path

from gradscale.engine.saved import Saved, read_saved

LARGEST_FILE = 2**20
"""Bytes of the largest file. A policy and its state take less than two thousand."""


def read_file(path: str | Path) -> Saved:
    """Returns what `write_saved` made, from a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it does not hold a saved scaler.
    """
    with open(path, "rb") as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise ValueError(f"A saved LossScaler takes at most {LARGEST_FILE} bytes. Received: {path}, which is larger.")
    try:
        mapping = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`path` must name a JSON file that `save` wrote. Received: {path} ({error}).") from error
    try:
        return read_saved(mapping)
    except TypeError as error:  # `path` has the right type, so what is in the file is a matter of value
        raise ValueError(str(error)) from error
