"""Finds one member of a zip file in memory, and unpacks that alone.

Python's `zipfile` makes an object for every member, and unpacks with methods that take as much memory as a file asks
for. A file of `torch.save` has a member for each tensor and no compression; deflate is read too.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from gradscale.peers._stand_ins import damaged

LARGEST_MEMBER = 2**25
"""Bytes of the largest `data.pkl`. Tensors are in other members: it holds about 200 bytes for each."""

MOST_MEMBERS = 100_000
"""Members of the largest file."""

# The records of a zip file, as 4.3 of PKWARE's APPNOTE.TXT lays them out.
_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_LONGEST_COMMENT = 2**16 - 1
_ZIP64 = 1
_IN_ZIP64_FIELD = 2**32 - 1
_ENCRYPTED = 1
_STORED, _DEFLATED = 0, 8


class _Member(NamedTuple):
    name: bytes
    flags: int
    method: int
    crc: int
    packed_size: int
    size: int
    at: int
    extra: bytes


def member_of_zip(data: bytes, name: str) -> bytes:
    """Returns the contents of the one member called `name`, in whatever folder.

    Raises:
        ValueError: there is not exactly one, it is too large, or the file is damaged.
    """
    found = [member for member in _members(data) if member.name.rpartition(b"/")[2] == name.encode()]
    if len(found) != 1:
        raise ValueError(f"A file of `torch.save` holds one `{name}`. Received: a zip file with {len(found)}.")
    # Only of this member: fields of zeros, in every member of a file, would take seconds to walk through.
    member = _widened(found[0])
    if member.size > LARGEST_MEMBER:
        raise ValueError(
            f"The `{name}` of a checkpoint must not be larger than {LARGEST_MEMBER} bytes. "
            f"Received: {member.size}. Tensors are stored in files of their own."
        )
    return _unpacked(data, member)


def _record(layout: struct.Struct, signature: bytes, data: bytes, at: int) -> tuple[int, ...]:
    """Returns the fields of a record after its signature."""
    if not 0 <= at <= len(data) - layout.size or not data.startswith(signature, at):
        damaged("a zip file without its directory")
    return layout.unpack_from(data, at)[1:]


def _members(data: bytes) -> Iterator[_Member]:
    """Yields what the directory at the end of the file says of each member."""
    end = data.rfind(b"PK\5\6", max(0, len(data) - _END.size - _LONGEST_COMMENT))
    *_, count, _, at, _ = _record(_END, b"PK\5\6", data, end)
    if data.startswith(b"PK\6\7", before := end - _END64_LOCATOR.size) and before >= 0:
        _, end64, _ = _record(_END64_LOCATOR, b"PK\6\7", data, before)
        *_, count, _, at = _record(_END64, b"PK\6\6", data, end64)
    if count > MOST_MEMBERS:
        raise ValueError(f"A zip file may have up to {MOST_MEMBERS} members. Received: {count}.")
    for _ in range(count):
        _, _, flags, method, _, _, crc, packed, size, *lengths, _, _, _, local = _record(_ENTRY, b"PK\1\2", data, at)
        name_at = at + _ENTRY.size
        extra_at = name_at + lengths[0]
        extra = data[extra_at : extra_at + lengths[1]]
        yield _Member(data[name_at:extra_at], flags, method, crc, packed, size, local, extra)
        at = extra_at + lengths[1] + lengths[2]


def _widened(member: _Member) -> _Member:
    """Returns `member` with the sizes and the offset of its zip64 field, where they do not fit 32 bits."""
    field = _zip64_field(member.extra)
    wide = member._asdict()
    for name in ("size", "packed_size", "at"):
        if wide[name] == _IN_ZIP64_FIELD and len(field) >= 8:
            wide[name], field = int.from_bytes(field[:8], "little"), field[8:]
    return _Member(**wide)


def _zip64_field(extra: bytes) -> bytes:
    at = 0
    while at <= len(extra) - 4:
        kind, size = struct.unpack_from("<HH", extra, at)
        at += 4
        if kind == _ZIP64:
            return extra[at : at + size]
        at += size
    return b""


def _unpacked(data: bytes, member: _Member) -> bytes:
    *_, name_length, extra_length = _record(_LOCAL, b"PK\3\4", data, member.at)
    start = member.at + _LOCAL.size + name_length + extra_length
    packed = memoryview(data)[start : start + member.packed_size]
    if member.flags & _ENCRYPTED or member.method not in (_STORED, _DEFLATED):
        damaged(f"an encrypted zip file, or one with compression method {member.method}")
    if member.method == _STORED:
        unpacked = bytes(packed[: member.size])
    else:
        try:
            unpacked = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, member.size + 1)
        except zlib.error as error:
            damaged(str(error))
    if len(unpacked) != member.size or zlib.crc32(unpacked) != member.crc:
        damaged("a zip file whose contents do not have the size and checksum they should")
    return unpacked
