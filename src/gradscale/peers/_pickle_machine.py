"""A stack machine for the instructions of a pickle, in bounded memory and time.

What no scaler needs is not kept: long texts, and sets. Nothing from a file is hashed but texts, and nothing takes the
memory that a file says it takes.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any, cast

from gradscale.peers._stand_ins import UNREAD, Global, Made, StandIn, Unread, damaged

LONGEST_TEXT = 2**16
"""Bytes of the longest text or byte string that is kept. The keys of a scaler are shorter, and so is its pickle."""

LONGEST_NUMBER = 1000
"""Bytes of the longest number, and of the longest name on a line of its own."""

_WRITTEN_BOOLS = {"00": False, "01": True}

_CONTAINER_WORK = 4
"""Work for a list, a dict or an object: an empty one has the size of a few numbers."""


class Machine:
    """The stack, the memo and the position in the bytes of a file. Each method is an instruction, or a part of one.

    Every method raises `ValueError` if the file is damaged, too large, or names something unknown.

    Args:
        data: the bytes of the file.
        names: what a call of each known name makes.
        most_work: instructions and values that the file may have. Each takes at most about 45 bytes and a microsecond.
    """

    def __init__(self, data: bytes, names: Mapping[str, Callable[[], Made]], most_work: int) -> None:
        self._data = data
        self._names = names
        self._most_work = most_work
        self._at = 0
        self._work = 0
        self.start()

    def start(self) -> None:
        """Clears the stack and the memo, for the next pickle of the file."""
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []

    def spend(self, work: int) -> None:
        """Counts work; raises if it is too much."""
        self._work += work
        if self._work > self._most_work:
            raise ValueError(
                f"A pickle may hold up to {self._most_work} instructions and values. Received: a larger one. If you "
                "trust the file, load it with the system that wrote it, or with `torch.load(path, weights_only=True)`, "
                "and pass the mapping."
            )

    # The bytes.

    def take(self, size: int) -> bytes:
        """Returns the next `size` bytes."""
        start = self.skip(size)
        return self._data[start : self._at]

    def skip(self, size: int) -> int:
        """Goes `size` bytes on, and returns where they start."""
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            damaged("it ends too early")
        return start

    def take_int(self, width: int) -> int:
        """Returns the next `width` bytes as a number: a size, or an index."""
        return int.from_bytes(self.take(width), "little")

    def take_line(self) -> str | Unread:
        """Returns the bytes up to the next line break as text."""
        end = self._data.find(b"\n", self._at, self._at + LONGEST_NUMBER + 1)
        if end < 0:
            damaged(f"a line does not end within {LONGEST_NUMBER} bytes")
        line = self.take(end - self._at)
        self.skip(1)
        return _decoded(line)

    # The stack.

    def push(self, value: Any) -> None:
        """Puts a value onto the stack."""
        self._stack.append(value)

    def pop(self) -> Any:
        """Takes the last value from the stack."""
        if not self._stack:
            damaged("a value is missing")
        return self._stack.pop()

    def top(self) -> Any:
        """Returns the last value of the stack."""
        return self._stack[-1] if self._stack else damaged("a value is missing")

    def mark(self) -> None:
        """Marks where the values of the next list, tuple or dict begin."""
        self._marks.append(len(self._stack))

    def pop_to_mark(self) -> list[Any]:
        """Takes the values after the last mark."""
        if not self._marks or self._marks[-1] > len(self._stack):
            damaged("a mark is missing")
        mark = self._marks.pop()
        values = self._stack[mark:]
        del self._stack[mark:]
        return values

    # The memo: values that later instructions name by number.

    def put(self, index: int | None = None) -> None:
        """Numbers the last value."""
        number = len(self._memo) if index is None else index
        # Python counts from 0, or from 1 in version 2. A file that leaves out numbers gets no memory for them.
        if not 0 <= number <= len(self._memo) + 1:
            damaged(f"it numbers a value {number} after {len(self._memo)} others")
        while len(self._memo) <= number:
            self._memo.append(UNREAD)
        self._memo[number] = self.top()

    def get(self, index: int) -> None:
        """Pushes the value of a number."""
        if not 0 <= index < len(self._memo):
            damaged(f"it has no value of number {index}")
        self.push(self._memo[index])

    # Texts and numbers.

    def text(self, width: int) -> None:
        """Pushes a text."""
        self.push(_decoded(data) if isinstance(data := self._sized(width), bytes) else data)

    def bytes_(self, width: int) -> None:
        """Pushes a byte string."""
        self.push(self._sized(width))

    def _sized(self, width: int) -> bytes | Unread:
        """Returns the bytes that follow their own number, unless they are too long to be a scaler's."""
        size = self.take_int(width)
        if size > LONGEST_TEXT:
            self.skip(size)
            return UNREAD
        self.spend(1 + size // 8)
        return self.take(size)

    def integer(self, width: int) -> None:
        """Pushes an integer of any size; nothing of a very long one."""
        size = self.take_int(width)
        if size > LONGEST_NUMBER:
            self.skip(size)
            return self.push(UNREAD)
        self.spend(size // 16)
        self.push(int.from_bytes(self.take(size), "little", signed=True))

    def number(self, layout: struct.Struct) -> None:
        """Pushes a number of fixed size."""
        self.push(layout.unpack_from(self._data, self.skip(layout.size))[0])

    def written_number(self, kind: type[int] | type[float]) -> None:
        """Pushes a number that is written in digits. `00` and `01` are bools."""
        line = str(self.take_line())
        try:
            self.push(_WRITTEN_BOOLS[line] if line in _WRITTEN_BOOLS else kind(line.removesuffix("L")))
        except ValueError:
            damaged("digits are missing")

    def written_index(self) -> int:
        """Returns an index that is written in digits."""
        self.written_number(int)
        return int(self.pop())

    def written_text(self, quotes: int) -> None:
        """Pushes a text on a line of its own. One with an escape sequence is no key of a scaler."""
        line = str(self.take_line())
        self.push(UNREAD if "\\" in line else line[quotes : len(line) - quotes])

    # Lists, tuples, dicts.

    def container(self, made: Made | list[Any]) -> None:
        """Pushes a new container."""
        self.spend(_CONTAINER_WORK)
        self.push(made)

    def tuple_(self, size: int) -> None:
        """Replaces the last `size` values by a tuple of them."""
        self.spend(1)
        first = len(self._stack) - size
        if first < 0:
            damaged("a value is missing")
        self._stack[first:] = [tuple(self._stack[first:])]

    def extend(self, values: list[Any]) -> None:
        """Appends to the list on top of the stack."""
        if type(found := self.top()) is not list:
            damaged("a list is missing")
        cast("list[Any]", found).extend(values)

    def fill(self, values: list[Any]) -> None:
        """Adds keys and values, in turns, to the dict on top of the stack."""
        if type(top := self.top()) is not dict or len(values) % 2:
            damaged("a dict, or a value of it, is missing")
        found = cast("dict[str, Any]", top)
        self.spend(len(values))
        for key, value in zip(values[::2], values[1::2], strict=True):
            found[key if type(key) is str else _text_for(key, len(found))] = value

    def fill_by_pairs(self, pairs: Any) -> None:
        """Fills the dict of `OrderedDict([[key, value], ...])`, as Python 2 writes it."""
        listed = cast("list[Any]", pairs) if type(pairs) is list else damaged("a dict is not made from a list")
        self.spend(len(listed))
        if not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in listed):
            damaged("a dict is not made from pairs")
        self.fill([part for pair in listed for part in pair])

    # Names and objects.

    def name(self, module: Any, name: Any) -> None:
        """Pushes what stands for a name; raises if it is unknown."""
        full = f"{module}.{name}" if type(module) is type(name) is str else damaged("a name is not a text")
        if full not in self._names:
            raise ValueError(
                "A pickled state may hold the scalers of DeepSpeed and apex, and plain values. "
                f"Received: a pickle that uses `{full[:LONGEST_NUMBER]}`. If you trust the file, load it with the "
                "system that wrote it and pass the mapping, or the scaler object itself."
            )
        self.push(Global(self._names[full]))

    def call(self, function: Any, arguments: Any) -> None:
        """Pushes what a call makes. The arguments are dropped, but for those of a dict."""
        if type(function) is not Global:
            damaged("it calls something that is not a name")
        self.container(made := function.make())
        if type(made) is dict and arguments:
            self.fill_by_pairs(arguments[0] if type(arguments) is tuple else None)

    def build(self) -> None:
        """Gives attributes to the object on top of the stack."""
        state, target = self.pop(), self.top()
        if isinstance(target, StandIn):
            if type(state) is not dict:
                raise ValueError(
                    f"A pickled scaler keeps its attributes in a dict. Received: {type(state).__name__}. "
                    "It was not written by the class it names."
                )
            target.attributes = state
        elif not isinstance(target, Unread | dict):  # a dict is an `OrderedDict` with attributes, such as `_metadata`
            damaged("attributes belong to no object")


def _decoded(data: bytes) -> str | Unread:
    """Returns a text, unless it is none."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        return UNREAD


def _text_for(key: Any, index: int) -> str:
    """Returns the text under which a dict keeps an entry whose key is not a text: an integer's digits, or a new text.

    Integers can be chosen so that all their hashes collide, and tuples so deep that hashing them ends the process.
    """
    return str(key) if type(key) is int and key.bit_length() <= 64 else f"<{type(key).__name__} {index}>"
