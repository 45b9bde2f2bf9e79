"""Reads the plain values of a pickle, in bounded memory and time, without running or importing anything.

A pickle is a program for a small stack machine. Python's own machine trusts it: nine bytes can ask it for a gigabyte,
and a few hundred make a value so deep that hashing it ends the process. This one knows the instructions that
checkpoints are made of (Python's `pickletools` documents them all) and bounds what each can take.
"""

import struct
from collections.abc import Callable
from typing import Any

from gradscale.peers._pickle_machine import Machine
from gradscale.peers._stand_ins import UNREAD, damaged

STOP = b"."


def read_pickle(machine: Machine) -> Any:
    """Returns the value of the next pickle of a file.

    Raises:
        ValueError: it is damaged or too large, or names something unknown.
    """
    machine.start()
    while (code := machine.take(1)) != STOP:
        machine.spend(1)
        if code not in _INSTRUCTIONS:
            damaged(f"no checkpoint has the instruction {code!r}")
        _INSTRUCTIONS[code](machine)
    return machine.pop()


def _name_on_stack(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    m.name(module, name)


def _call(m: Machine) -> None:
    arguments, function = m.pop(), m.pop()
    m.call(function, arguments)


def _call_with_keywords(m: Machine) -> None:
    m.pop()
    _call(m)


def _object_at_mark(m: Machine) -> None:
    values = m.pop_to_mark() or damaged("a class is missing")
    m.call(values[0], ())


def _object_on_lines(m: Machine) -> None:
    m.pop_to_mark()
    m.name(m.take_line(), m.take_line())
    m.call(m.pop(), ())


def _set_item(m: Machine) -> None:
    value, key = m.pop(), m.pop()
    m.fill([key, value])


def _dict(m: Machine) -> None:
    values = m.pop_to_mark()
    m.container({})
    m.fill(values)


def _replace_by_unread(m: Machine, dropped: Callable[[], Any]) -> None:
    dropped()
    m.push(UNREAD)


_UINT1, _UINT2, _INT4, _FLOAT8 = (struct.Struct(layout) for layout in ("<B", "<H", "<i", ">d"))

# Left out, and so refused: names by number (EXT1, EXT2, EXT4), and buffers outside the pickle (NEXT_BUFFER,
# READONLY_BUFFER). No checkpoint has them.
_INSTRUCTIONS: dict[bytes, Callable[[Machine], Any]] = {
    # PROTO, FRAME
    b"\x80": lambda m: m.skip(1),
    b"\x95": lambda m: m.skip(8),
    # NONE, NEWTRUE, NEWFALSE; numbers
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"K": lambda m: m.number(_UINT1),
    b"M": lambda m: m.number(_UINT2),
    b"J": lambda m: m.number(_INT4),
    b"G": lambda m: m.number(_FLOAT8),
    b"\x8a": lambda m: m.integer(1),
    b"\x8b": lambda m: m.integer(4),
    b"I": lambda m: m.written_number(int),
    b"L": lambda m: m.written_number(int),
    b"F": lambda m: m.written_number(float),
    # UNICODE and STRING (Python 2's), BYTES
    b"\x8c": lambda m: m.text(1),
    b"X": lambda m: m.text(4),
    b"\x8d": lambda m: m.text(8),
    b"U": lambda m: m.text(1),
    b"T": lambda m: m.text(4),
    b"V": lambda m: m.written_text(quotes=0),
    b"S": lambda m: m.written_text(quotes=1),
    b"C": lambda m: m.bytes_(1),
    b"B": lambda m: m.bytes_(4),
    b"\x8e": lambda m: m.bytes_(8),
    b"\x96": lambda m: m.bytes_(8),
    # MARK, POP, POP_MARK, DUP
    b"(": lambda m: m.mark(),
    b"0": lambda m: m.pop(),
    b"1": lambda m: m.pop_to_mark(),
    b"2": lambda m: m.push(m.top()),
    # GET, PUT, MEMOIZE
    b"h": lambda m: m.get(m.take_int(1)),
    b"j": lambda m: m.get(m.take_int(4)),
    b"g": lambda m: m.get(m.written_index()),
    b"q": lambda m: m.put(m.take_int(1)),
    b"r": lambda m: m.put(m.take_int(4)),
    b"p": lambda m: m.put(m.written_index()),
    b"\x94": lambda m: m.put(),
    # LIST, APPEND, TUPLE, DICT, SETITEM
    b"]": lambda m: m.container([]),
    b"l": lambda m: m.container(m.pop_to_mark()),
    b"a": lambda m: m.extend([m.pop()]),
    b"e": lambda m: m.extend(m.pop_to_mark()),
    b")": lambda m: m.tuple_(0),
    b"\x85": lambda m: m.tuple_(1),
    b"\x86": lambda m: m.tuple_(2),
    b"\x87": lambda m: m.tuple_(3),
    b"t": lambda m: m.push(tuple(m.pop_to_mark())),
    b"}": lambda m: m.container({}),
    b"d": _dict,
    b"s": _set_item,
    b"u": lambda m: m.fill(m.pop_to_mark()),
    # EMPTY_SET, ADDITEMS, FROZENSET: no scaler has a set
    b"\x8f": lambda m: m.push(UNREAD),
    b"\x90": lambda m: m.pop_to_mark(),
    b"\x91": lambda m: _replace_by_unread(m, m.pop_to_mark),
    # GLOBAL, STACK_GLOBAL, REDUCE, NEWOBJ, NEWOBJ_EX, OBJ, INST, BUILD
    b"c": lambda m: m.name(m.take_line(), m.take_line()),
    b"\x93": _name_on_stack,
    b"R": _call,
    b"\x81": _call,
    b"\x92": _call_with_keywords,
    b"o": _object_at_mark,
    b"i": _object_on_lines,
    b"b": lambda m: m.build(),
    # PERSID, BINPERSID: the data of a tensor, which `torch.save` keeps outside the pickle
    b"P": lambda m: _replace_by_unread(m, m.take_line),
    b"Q": lambda m: _replace_by_unread(m, m.pop),
}
