"""Reads the scaler objects pickled inside checkpoints, in bounded memory and time, without running code from them.

A pickle is a program for a small stack machine, which names functions and calls them. Python's own machine trusts it:
nine bytes can ask it for a gigabyte, and a few hundred make a value so deep that hashing it ends the process. Here
`pickletools` splits the program into instructions and says what each takes from the stack, and one table says what
those that checkpoints are made of leave there. Nothing is imported or called. Scalers become `StandIn` values that only
hold attributes, tensors and their storages become `UNREAD`, and any other name is refused. Nothing from a file is
hashed but texts, and nothing recurses, so that values may be as deep as they like.
"""

import io
import pickletools
import re
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from struct import error as StructError
from typing import Any, NoReturn, cast
from zipfile import BadZipFile
from zlib import error as ZlibError

from gradscale._text import short, shown

MOST_WORK = 1_000_000
"""Instructions and values in the pickle of any file. A tensor in a checkpoint is about 50, so that 20,000 fit."""

BYTES_FOR_WORK = 256
"""Bytes of a file that allow one more. So a file with more tensors is read if they have 3,000 elements on average."""

LONGEST_TEXT = 2**16
"""Bytes of the longest text or byte string that is kept. The keys of a scaler are shorter, and so is its pickle."""

LONGEST_NUMBER = 1000
"""Bytes of the longest number, and of the longest name on a line of its own."""

LARGEST_MEMBER = 2**25
"""Bytes of the largest `data.pkl`. Tensors are in other members: it holds about 200 bytes for each."""

MOST_MEMBERS = 100_000
"""Members of the largest zip file. `zipfile` makes an object of 500 bytes for each."""

LARGEST_DIRECTORY = 2**23
"""Bytes of the directory of the largest zip file: about 70 for a member, and `zipfile` takes 0.1 us for each."""

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
"""First pickle of a file that `torch.save` wrote before torch 1.6; a version and a system come before the object."""

_SURROGATES = re.compile("[\ud800-\udfff]")
"""Half characters: `pickletools` reads them, and no terminal or file takes a message with one."""


class Unread:
    """A tensor, a storage, a name or another part of a checkpoint that the scaler does not need.

    Args:
        make: makes what the pickle gets for a call of it; None for another part that is not read.
    """

    __slots__ = ("make",)

    def __init__(self, make: "Callable[[], StandIn | dict[str, Any]] | None" = None) -> None:
        self.make = make

    def __repr__(self) -> str:
        return "<not read; load the file with `torch.load(path, weights_only=True)` to get tensors>"


UNREAD = Unread()
"""One for all that nothing can be made of: a checkpoint has thousands."""


class StandIn:
    """A scaler: its attributes."""

    __slots__ = ("attributes",)

    def __init__(self) -> None:
        self.attributes: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<a pickled scaler with {len(self.attributes)} attributes>"


_DTYPES = "float16 bfloat16 float32 float64 uint8 int8 int16 int32 int64 bool"
_STORAGES = " ".join(f"{kind}Storage" for kind in "Float Half BFloat16 Double Byte Char Short Int Long Bool".split())
_SCALERS = {
    "deepspeed.runtime.fp16.loss_scaler": "DynamicLossScaler LossScaler LossScalerBase",
    "apex.amp.scaler": "LossScaler",
    "apex.fp16_utils.loss_scaler": "DynamicLossScaler LossScaler",
}
_NOT_READ = {
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "torch": f"Size Tensor device {_DTYPES} {_STORAGES}",
    "torch.cuda": _STORAGES,
    "torch._tensor": "_rebuild_from_type_v2",
    "torch._utils": "_rebuild_parameter _rebuild_tensor _rebuild_tensor_v2",
    "torch.storage": "UntypedStorage _load_from_bytes",
}
_NAMES = {
    f"{module}.{name}": unread
    for modules, unread in (
        ({"collections": "OrderedDict"}, Unread(dict[str, Any])),
        (_SCALERS, Unread(StandIn)),
        (_NOT_READ, UNREAD),
    )
    for module, names in modules.items()
    for name in names.split()
}


def unpickled(data: bytes) -> Any:
    """Returns the plain values of a pickle, with inert stand-ins for scalers and tensors.

    Takes the bytes of a pickle, or of a whole file that `torch.save` wrote, in its zip form or in the older one. It
    needs less than 100 MB and about a second, or a fifth of the size of a file that is larger than 256 MB.

    Raises:
        ValueError: the pickle names anything but a known scaler, or is damaged or too large.
    """
    pickled = _member_of_zip(data, "data.pkl") if data.startswith(b"PK") else data
    machine = _Machine(pickled, max(MOST_WORK, len(data) // BYTES_FOR_WORK))
    first = machine.read()
    if first != _LEGACY_MAGIC:
        return first
    _, _, value = (machine.read() for _ in range(3))
    return value


def attributes_of(scaler: Any) -> Mapping[str, Any]:
    """Returns the attributes of a scaler object: pickled, already unpickled, or the real one."""
    if isinstance(scaler, bytes | bytearray | memoryview):
        scaler = unpickled(bytes(cast("bytes", scaler)))
    if isinstance(scaler, StandIn):
        return scaler.attributes
    if isinstance(scaler, Mapping):
        return cast("Mapping[str, Any]", scaler)
    if isinstance(found := getattr(scaler, "__dict__", None), dict):
        return cast("dict[str, Any]", found)
    raise TypeError(
        "`loss_scaler` must be the scaler object, its attributes as a mapping, or the bytes of its pickle. "
        f"Received: {shown(scaler)}."
    )


def _damaged(reason: str) -> NoReturn:
    raise ValueError(
        "The bytes must be a pickle, or a file that `torch.save` wrote. "
        f"Received: something that cannot be read ({reason})."
    )


@contextmanager
def _errors_as_damage() -> Generator[None]:
    """Raises what `pickletools` and `zipfile` say of a file as an error of ours, cut short: it may quote the file."""
    try:
        yield
    except (ArithmeticError, EOFError, OSError, RuntimeError, ValueError, BadZipFile, StructError, ZlibError) as error:
        _damaged(short(str(error)))


class _ZipStream(io.BytesIO):
    """The bytes of a zip file, of which `zipfile` gets no directory that takes it much memory or time."""

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size) if size is None or size <= LARGEST_MEMBER else None
        if found is None or (
            found.startswith(b"PK\1\2") and (len(found) > LARGEST_DIRECTORY or found.count(b"PK\1\2") > MOST_MEMBERS)
        ):
            raise BadZipFile(f"more than {MOST_MEMBERS} members, or {LARGEST_DIRECTORY} bytes that name them")
        return found


def _member_of_zip(data: bytes, name: str) -> bytes:
    """Returns the contents of the one member called `name`, in whatever folder."""
    with _errors_as_damage():
        archive = zipfile.ZipFile(_ZipStream(data))
    found = [member for member in archive.infolist() if member.filename.rpartition("/")[2] == name]
    if len(found) != 1:
        raise ValueError(f"A file of `torch.save` holds one `{name}`. Received: a zip file with {len(found)}.")
    member = found[0]
    if member.file_size > LARGEST_MEMBER:
        raise ValueError(
            f"The `{name}` of a checkpoint must not be larger than {LARGEST_MEMBER} bytes. "
            f"Received: {member.file_size}. Tensors are stored in files of their own."
        )
    # The other methods unpack as much at once as a file asks for, whatever size it gives.
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        _damaged(f"a zip file with compression method {member.compress_type}")
    with _errors_as_damage(), archive.open(member) as stream:
        unpacked = stream.read(member.file_size)  # with its size: without one, `zipfile` unpacks a gigabyte at once
    return unpacked if len(unpacked) == member.file_size else _damaged("a zip file that ends too early")


class _Skipped(bytes):
    """Stands for bytes that were not read: it holds nothing, and has their length for who checks it."""

    length = 0

    def __len__(self) -> int:
        return self.length


class _PickleStream(io.BytesIO):
    """The bytes of a pickle, of which `pickletools` gets no long value and no long line."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size <= LONGEST_TEXT:
            return super().read(size)
        start = self.tell()
        skipped = _Skipped()
        skipped.length = min(size, self.seek(0, io.SEEK_END) - start)
        self.seek(start + skipped.length)
        return skipped

    def readline(self, size: int | None = -1, /) -> bytes:
        # A text with an escape sequence is no key of a scaler, and Python warns of those that it does not know.
        return super().readline(LONGEST_NUMBER + 1).replace(b"\\", b"?")


class _Machine:
    """The stack, the memo and the position in the bytes of a file.

    Args:
        data: the bytes of the file.
        most_work: instructions and values that the file may have. Each takes at most about 45 bytes and a microsecond.
    """

    def __init__(self, data: bytes, most_work: int) -> None:
        self._stream = _PickleStream(data)
        self._most_work = self._work_left = most_work

    def read(self) -> Any:
        """Returns the value of the next pickle of the file.

        Raises:
            ValueError: it is damaged or too large, or names something unknown.
        """
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        made: Any = None
        for instruction, value, start in self._instructions():
            size = self._stream.tell() - cast("int", start)
            if size > LONGEST_TEXT + 9 or (type(value) is int and value.bit_length() > 8 * LONGEST_NUMBER):
                size, value = 0, UNREAD
            elif type(value) is str and not value.isascii() and _SURROGATES.search(value):
                value = UNREAD
            self.spend(1 + size // 10 + isinstance(value, str | bytes | bytearray))
            made = self._follow(instruction, value)
        return made

    def _instructions(self) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
        with _errors_as_damage():
            yield from pickletools.genops(self._stream)

    def spend(self, work: int) -> None:
        """Counts work; raises if it is too much."""
        self._work_left -= work
        if self._work_left < 0:
            raise ValueError(
                f"A pickle may hold up to {self._most_work} instructions and values. Received: a larger one. If you "
                "trust the file, load it with the system that wrote it, or with `torch.load(path, weights_only=True)`, "
                "and pass the mapping."
            )

    def _follow(self, instruction: pickletools.OpcodeInfo, value: Any) -> Any:
        """Takes from the stack what `pickletools` says that the instruction takes; pushes and returns what it makes."""
        name = instruction.name
        if name == "MARK":
            self.marks.append(len(self.stack))
        elif name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            self._put(len(self.memo) if value is None else value)
        elif name in _MAKERS:
            self.spend(_WORK.get(name, 0))
            taken = self._take(instruction.stack_before) if instruction.stack_before else []
            made = _MAKERS[name](self, taken, value)
            if instruction.stack_after:
                self.stack.append(made)
            return made
        elif name not in ("PROTO", "FRAME"):
            _damaged(f"no checkpoint has the instruction {name}")

    def _take(self, wanted: list[pickletools.StackObject]) -> list[Any]:
        """Takes as many values from the stack as are wanted, or all since the last mark and those wanted before it."""
        first = len(self.stack) - len(wanted)
        if pickletools.markobject in wanted:
            mark = self.marks.pop() if self.marks else _damaged("a mark is missing")
            first = mark - wanted.index(pickletools.markobject)
        if first < (self.marks[-1] if self.marks else 0):
            _damaged("a value is missing")
        taken = self.stack[first:]
        del self.stack[first:]
        return taken

    def _put(self, number: int) -> None:
        """Numbers the last value, for later instructions."""
        # Python counts from 0, or from 1 in version 2. A file that leaves out numbers gets no memory for them.
        if not 0 <= number <= len(self.memo) + 1:
            _damaged(f"it numbers a value {short(number)} after {len(self.memo)} others")
        self.memo.extend([UNREAD] * (number + 1 - len(self.memo)))
        self.memo[number] = self.stack[-1] if self.stack else _damaged("a value is missing")

    def get(self, number: int) -> Any:
        """Returns the value of a number."""
        return self.memo[number] if 0 <= number < len(self.memo) else _damaged(f"it has no value {short(number)}")

    def extended(self, found: Any, *values: Any) -> list[Any]:
        """Returns a list with values appended."""
        if type(found) is not list:
            _damaged("a list is missing")
        cast("list[Any]", found).extend(values)
        return cast("list[Any]", found)

    def filled(self, found: Any, *values: Any) -> dict[str, Any]:
        """Returns a dict with keys and values, which come in turns, added."""
        if type(found) is not dict or len(values) % 2:
            _damaged("a dict, or a value of it, is missing")
        entries = cast("dict[str, Any]", found)
        self.spend(len(values))
        for key, value in zip(values[::2], values[1::2], strict=True):
            entries[key if type(key) is str else _text_for(key, len(entries))] = value
        return entries

    def name(self, module: Any, name: Any) -> Unread:
        """Returns what stands for a name; raises if it is unknown."""
        full = f"{module}.{name}" if type(module) is type(name) is str else _damaged("a name is not a text")
        if full not in _NAMES:
            raise ValueError(
                "A pickled state may hold the scalers of DeepSpeed and apex, and plain values. "
                f"Received: a pickle that uses `{full[:LONGEST_NUMBER]}`. If you trust the file, load it with the "
                "system that wrote it and pass the mapping, or the scaler object itself."
            )
        return _NAMES[full]

    def call(self, function: Any, *arguments: Any) -> Any:
        """Returns what a call makes. The arguments are dropped, but for the pairs of `OrderedDict([[key, value]])`."""
        if type(function) is not Unread:
            _damaged("it calls something that is not a name")
        made = function.make() if function.make else UNREAD
        if not (isinstance(made, dict) and arguments and arguments[0]):
            return made
        pairs = cast("list[Any]", arguments[0][0] if type(arguments[0]) is tuple else None)
        if type(pairs) is not list or not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
            _damaged("a dict is not made from pairs")
        return self.filled(made, *(part for pair in pairs for part in pair))

    def built(self, target: Any, state: Any) -> Any:
        """Returns an object with its attributes."""
        if type(target) is StandIn:
            if type(state) is not dict:
                raise ValueError(
                    f"A pickled scaler keeps its attributes in a dict. Received: {type(state).__name__}. "
                    "It was not written by the class it names."
                )
            target.attributes = state
        elif type(target) not in (Unread, dict):  # a dict is an `OrderedDict` with attributes, such as `_metadata`
            _damaged("attributes belong to no object")
        return target


def _text_for(key: Any, index: int) -> str:
    """Returns the text under which a dict keeps an entry whose key is not a text: an integer's digits, or a new text.

    Integers can be chosen so that all their hashes collide, and tuples so deep that hashing them ends the process.
    """
    return str(key) if type(key) is int and key.bit_length() <= 64 else f"<{type(key).__name__} {index}>"


_VALUES = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
)
# The data of a tensor, which `torch.save` keeps outside the pickle, and sets, which no scaler has.
_NOT_READ_VALUES = ("PERSID", "BINPERSID", "EMPTY_SET", "ADDITEMS", "FROZENSET")

_MAKERS: dict[str, Callable[[_Machine, list[Any], Any], Any]] = {
    **dict.fromkeys(_VALUES, lambda m, taken, value: value),
    **dict.fromkeys(_NOT_READ_VALUES, lambda m, taken, value: UNREAD),
    **dict.fromkeys(("NONE", "POP", "POP_MARK"), lambda m, taken, value: None),
    "NEWTRUE": lambda m, taken, value: True,
    "NEWFALSE": lambda m, taken, value: False,
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, taken, number: m.get(number)),
    **dict.fromkeys(("EMPTY_LIST", "LIST"), lambda m, taken, value: taken),
    **dict.fromkeys(("APPEND", "APPENDS"), lambda m, taken, value: m.extended(*taken)),
    **dict.fromkeys(("EMPTY_DICT", "DICT"), lambda m, taken, value: m.filled({}, *taken)),
    **dict.fromkeys(("SETITEM", "SETITEMS"), lambda m, taken, value: m.filled(*taken)),
    **dict.fromkeys(("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"), lambda m, taken, value: tuple(taken)),
    "GLOBAL": lambda m, taken, name: m.name(*name.split(" ", 1)),
    "STACK_GLOBAL": lambda m, taken, value: m.name(*taken),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda m, taken, value: m.call(*taken)),
    "OBJ": lambda m, taken, value: m.call(*taken[:1] or _damaged("a class is missing")),
    "BUILD": lambda m, taken, value: m.built(*taken),
    "STOP": lambda m, taken, value: taken[0],
}
"""What an instruction makes of the values that it takes and of the one that it holds.

Left out, and so refused, are those that no checkpoint has: names by number, buffers outside the pickle, and what only
protocol 0 and `__getnewargs_ex__` need.
"""

_WORK = {
    **dict.fromkeys(("EMPTY_LIST", "LIST", "EMPTY_DICT", "DICT", "REDUCE", "NEWOBJ", "OBJ"), 4),
    **dict.fromkeys(("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"), 1),
}
"""What a container costs beyond its instruction: an empty list, dict or object has the size of a few numbers."""
