"""The sequences to replay, read from files or standard input: plain numbers, or JSON."""

import json
import re
import sys
from typing import Any, cast

from gradscale._text import shown_keys

STDIN = "-"
LARGEST_TEXT = 2**25
"""Bytes of the longest text: the flags of 16 million steps, or the magnitudes of 2 million."""
NAMES = ("found_inf", "amax", "loss_finite", "upper_share")
SIZES = "To replay the largest gradient of each step, give the file by --amax FILE."
"""The fix where a file of flags holds other numbers."""
FLAGS = {"0": 0, "1": 1, "false": 0, "true": 1}


def read_sequences(flags: str | None, amax: str | None) -> dict[str, list[Any]]:
    """Returns the sequences by their argument names in `gradscale.replay`.

    Args:
        flags: path of the flags, or of a JSON object with several sequences; `-` is standard input. None reads no
            flags where `amax` is given, and standard input where it is not.
        amax: path of the largest gradients; `-` is standard input.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is empty, is not text, or does not hold what it should.
    """
    for name, path in (("FILE", flags), ("`--amax`", amax)):
        if path == "":
            raise ValueError(f"{name} must name a file, or be {STDIN} for standard input. Received: ''.")
    if flags == STDIN and amax == STDIN:
        raise ValueError("Only one of the flags and --amax can come from standard input.")
    found: dict[str, list[Any]] = {}
    if flags is not None or amax is None:
        found = _sequences(*_text(STDIN if flags is None else flags))
    if amax is not None:
        if "amax" in found:
            raise ValueError(f"`amax` is given twice: by --amax and in {flags}.")
        found["amax"] = _magnitudes(*_text(amax))
    return found


def _text(path: str) -> tuple[str, str]:
    """Returns the name of a source for messages, and its text."""
    if path == STDIN and sys.stdin.isatty():
        raise ValueError("There is nothing to replay. Name a file of flags, or pipe flags in; --help shows how.")
    source = "standard input" if path == STDIN else path
    data = _read(path)
    if len(data) > LARGEST_TEXT:
        raise ValueError(f"{source} must not be larger than {LARGEST_TEXT} bytes. Replay it in parts.")
    try:
        text = data.decode("utf-8-sig").strip()  # with or without a byte order mark, which Windows tools write
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} must be UTF-8 text: {error.reason} at byte {error.start}.") from None
    if not text:
        raise ValueError(f"{source} is empty. It should hold a value for each step.")
    return source, text


def _read(path: str) -> bytes:
    """Returns at most one byte more than a text may have: a device, such as /dev/zero, has no end."""
    if path == STDIN:
        return sys.stdin.buffer.read(LARGEST_TEXT + 1)
    with open(path, "rb") as file:
        return file.read(LARGEST_TEXT + 1)


def _sequences(source: str, text: str) -> dict[str, list[Any]]:
    """Returns the flags in a text or JSON list, or the sequences in a JSON object."""
    if text[0] not in "[{":
        return {"found_inf": _flags(source, text)}
    parsed = _json(source, text)
    if isinstance(parsed, list):
        return {"found_inf": _restored(source, cast(list[Any], parsed))}
    named = cast(dict[str, Any], parsed)
    if not named or named.keys() - set(NAMES):
        raise ValueError(
            f"{source}: a JSON object has some of the keys {', '.join(NAMES)}. Received: {shown_keys(named)}."
        )
    return {name: _restored(f"{source}: {name}", values) for name, values in named.items()}


def _flags(source: str, text: str) -> list[int]:
    words = re.split(r"[\s,]+", text.strip(", \n"))
    for index, word in enumerate(words):
        if word.lower() not in FLAGS:
            raise ValueError(
                f"{source} must hold 0 or 1 for each step, separated by spaces, commas or lines. "
                f"Received: {word[:40]!r} at step {index}.{f' {SIZES}' if _is_number(word) else ''}"
            )
    return [FLAGS[word.lower()] for word in words]


def _magnitudes(source: str, text: str) -> list[Any]:
    if text[0] in "[{":
        return _restored(source, _json(source, text))
    return [_float(source, word) for word in re.split(r"[\s,]+", text.strip(", \n"))]


def _json(source: str, text: str) -> Any:
    # Each empty list inside a list would take twenty times the memory of its text.
    if text.count("[") > len(NAMES) or text.count("{") > 1:
        raise ValueError(f"{source} is not valid JSON for a replay: one list, or one object with a list for each key.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not valid JSON: {error}.") from None


def _restored(source: str, values: Any) -> list[Any]:
    """Returns a JSON list with strings turned into numbers, such as "inf", which JSON has no number for."""
    if not isinstance(values, list):
        raise ValueError(f"{source} must be a JSON list with a value for each step. Received: {type(values).__name__}.")
    return [_float(source, item) if isinstance(item, str) else item for item in cast(list[Any], values)]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _float(source: str, word: str) -> float:
    if not _is_number(word):
        raise ValueError(f"{source} must hold numbers. Received: {word[:40]!r}.")
    return float(word)
