"""Files that ask for more memory or time than their size would suggest."""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable

MANY = 200_000
"""Of most things: enough to fail with Python's own unpickler, and few enough to make quickly."""


TOO_LONG = 100 * 2**20


def zipped(data: bytes, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        archive.writestr("a/data.pkl", data)
    return stream.getvalue()


def zip_of_many(members: int) -> bytes:
    """A zip file whose directory names one empty member many times, with the zip64 records that it takes."""
    start = zipped(b"")
    at = start.find(b"PK\1\2")
    entries = start[at : start.find(b"PK\5\6")] * members
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, members, members, len(entries), at)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, at + len(entries), 1)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
    return start[:at] + entries + end64 + locator + end


def zip_of_fields(members: int) -> bytes:
    """A zip file whose directory gives every member, but for the pickle, as many empty fields as fit."""
    start = zipped(b"N.")
    at = start.find(b"PK\1\2")
    fields = struct.pack("<HH", 2, 0) * 16_000
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", *[0] * 7, *[2**32 - 1] * 2, 1, len(fields), *[0] * 5) + b"x" + fields
    directory = entry * members + start[at : start.find(b"PK\5\6")]
    return start[:at] + directory + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, *[members + 1] * 2, len(directory), at, 0)


def lying_zip() -> bytes:
    """A zip file that says that its pickle is short."""
    data = bytearray(zipped(b"N" * TOO_LONG))
    for signature, offset in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
        at = data.find(signature) + offset
        data[at : at + 4] = struct.pack("<I", 10)
    return bytes(data)


def colliding() -> bytes:
    """Integers that all have the hash 0."""
    numbers = ((index * (2**61 - 1)).to_bytes(11, "little", signed=True) for index in range(50_000))
    return b"}(" + b"".join(b"\x8a\x0b" + number + b"N" for number in numbers) + b"u."


def doubled(levels: int) -> bytes:
    """A list of two equal lists, and so on: 2**levels items if it were spelt out."""
    value: object = 1
    for _ in range(levels):
        value = [value, value]
    return pickle.dumps({"scale": value, "loss_scale": value, "loss_scaler": {"cur_scale": value}})


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


OBJECT = b"cdeepspeed.runtime.fp16.loss_scaler\nDynamicLossScaler\n"
ORDERED = b"ccollections\nOrderedDict\n"
FILES: dict[str, Callable[[], bytes]] = {
    "a deep tuple as a key, zipped": lambda: zipped(b"\x80\x04}()" + b"\x85" * MANY + b"Nu."),
    "a deep tuple as a key": lambda: b"\x80\x04})" + b"\x85" * MANY + b"Ns.",
    "deep lists": lambda: b"]" * MANY + b"a" * (MANY - 1) + b".",
    "deep mappings": lambda: (b"}" + text("optimizer")) * 20_000 + b"N" + b"s" * 20_000 + b".",
    "deep lists under a key": lambda: b"}" + text("loss_scale") + b"]" * MANY + b"a" * (MANY - 1) + b"s.",
    "a mapping inside itself": lambda: b"}\x94" + text("optimizer") + b"h\x00s.",
    "a list inside itself": lambda: b"]\x94h\x00a.",
    "a number of the memo": lambda: b"\x80\x04}r\x00\x00\x00\x04.",
    "a written number of the memo": lambda: b"}p99999999\n.",
    "many lists, zipped": lambda: zipped(b"\x80\x04(" + b"]" * 9_000_000 + b"t."),
    "many mappings, zipped": lambda: zipped(b"(" + b"}NNs" * 4_000_000 + b"t."),
    "many numbers": lambda: b"(" + b"J\x00\x00\x00\x10" * 2_000_000 + b"t.",
    "many marks, zipped": lambda: zipped(b"(" * 20_000_000),
    "many objects": lambda: OBJECT + b"\x94" + b"h\x00)\x81" * 500_000 + b".",
    "many copies of a list of pairs": lambda: (
        ORDERED + b"\x94]\x94(" + b"NN\x86" * 10_000 + b"e" + b"h\x00h\x01\x85R" * 9999
    ),
    "many texts": lambda: b"(" + (b"X\xff\xff\0\0" + b"a" * 65531 + "\U0001f600".encode()) * 300 + b"t.",
    "colliding integers": colliding,
    "many keys": lambda: pickle.dumps({f"key{index}": None for index in range(100_000)}),
    "long keys": lambda: pickle.dumps({"k" * 60_000 + str(index): None for index in range(60)}),
    "a long text": lambda: zipped(pickle.dumps({"loss_scale": "x" * 30_000_000})),
    "a long text of wide characters": lambda: pickle.dumps({"loss_scale": "x" * 25_000_000 + "\U0001f600"}),
    "an unknown escape sequence": lambda: b"S'\\d'\n.",
    "an unknown escape sequence in a name": lambda: b"c\\d\n\\d\n.",
    "a long byte string": lambda: pickle.dumps({"loss_scaler": b"x" * 30_000_000, "scale": b"\xff" * 60_000}),
    "a long number": lambda: b"}" + text("loss_scale") + b"\x8b" + struct.pack("<I", 10**7) + b"\x7f" * 10**7 + b"s.",
    "a long written number": lambda: b"}" + text("loss_scale") + b"L" + b"9" * 10**6 + b"L\ns.",
    "a size beyond the end": lambda: b"\x8e" + b"\xff" * 7 + b"\x7f.",
    "a frame beyond the end": lambda: b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    "a list of two lists of two lists": lambda: doubled(100),
    "a large zip member": lambda: zipped(b"N" * TOO_LONG),
    "a larger zip member than it says": lying_zip,
    "LZMA": lambda: zipped(b"N" * 2**20, zipfile.ZIP_LZMA),
    "bzip2": lambda: zipped(b"N" * 2**20, zipfile.ZIP_BZIP2),
    "as many zip members as are read": lambda: zip_of_many(100_000),
    "zip members with many fields": lambda: zip_of_fields(100),
    "many zip members": lambda: zip_of_many(400_000),
}
