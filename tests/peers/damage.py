"""Damages a file as transfers, other programs and attackers do."""

import io
import re
import struct
import zipfile
from random import Random

NUMBERS = [b"G" + struct.pack(">d", value) for value in (0.0, -1.0, 0.5, 1e-40, 1e-320, 1e39, 1e300)]
NUMBERS += [b"G" + struct.pack(">d", value) for value in (float("inf"), -float("inf"), float("nan"))]
NUMBERS += [
    b"K\x00",
    b"K\x01",
    b"J\xff\xff\xff\xff",
    b"J\xff\xff\xff\x7f",
    b"\x8a\x09" + b"\x7f" * 9,
    b"\x8a\xff" + b"\x7f" * 255,
]
NUMBERS += [b"\x88", b"\x89", b"N", b"]", b"}", b"\x8c\x03inf", b")\x85"]
"""Values in a pickle that may stand where a number should, some of them numbers."""

PIECES = [bytes([code]) for code in b"().0]}tuseabRcQqrhjNKMJGXIF2\x80\x81\x85\x86\x88\x8a\x8b\x8c\x8e\x93\x94\x95"]
"""Instructions of a pickle."""

PIECES += [struct.pack(">d", value) for value in (0.0, -0.0, -1.0, 1e-320, 1e300, float("inf"), float("nan"))]
PIECES += [struct.pack("<I", value) for value in (0, 1, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1)]
PIECES += [
    b"X\x05\x00\x00\x00scale",
    b"X\x0a\x00\x00\x00loss_scale",
    b"\x8c\x09optimizer",
    b"ccollections\nOrderedDict\n",
]
PIECES += [b"NaN", b"1e999", b"-1", b"null", b"[", b"]", b"{", b"}", b'"inf"', b"true", b"9" * 50, b",", b'"']
"""Numbers, keys and signs that readers have to tell apart."""


def damaged_file(random: Random, files: list[bytes]) -> bytes:
    """Returns one of `files` with one to six changes; inside its pickle, for half of the zip files."""
    data = random.choice(files)
    if data.startswith(b"PK") and random.random() < 0.5:
        return _zipped(_changed(random, _pickle_of(data), files))
    return _changed(random, data, files)


def _changed(random: Random, data: bytes, files: list[bytes]) -> bytes:
    if random.random() < 0.4:
        return _with_another_number(random, data)
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        start = random.randint(0, len(data))
        end = min(len(data), start + random.choice((0, 1, 1, 2, 4, 8, 9, 40)))
        other = random.choice(files)
        at = random.randint(0, len(other))
        new = random.choice(
            (
                b"",
                random.randbytes(end - start),
                random.choice(PIECES),
                random.choice(PIECES),
                data[start:end] * random.choice((2, 3, 50)),
                other[at : at + random.randint(1, 60)],
            )
        )
        data = data[:start] + new + data[end:]
    return data[: random.randint(0, len(data))] if random.random() < 0.1 else data


def _with_another_number(random: Random, data: bytes) -> bytes:
    """Returns `data` with one number of its pickle replaced by another value, or two."""
    for _ in range(random.choice((1, 1, 2))):
        found = list(re.finditer(rb"G[\x3f-\x41][\x00-\xff]{7}|K[\x00-\xff]|M[\x00-\xff]{2}|\x88|\x89|\d+\.?\d*", data))
        if found:
            number = random.choice(found)
            new = random.choice(PIECES[-13:]) if number[0][:1].isdigit() else random.choice(NUMBERS)
            data = data[: number.start()] + new + data[number.end() :]
    return data


def _pickle_of(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))


def _zipped(data: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", data)
    return stream.getvalue()
