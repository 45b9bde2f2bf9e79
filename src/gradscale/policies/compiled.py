"""A rule as one Python function on numpy scalars: traced once, and written out without calls.

A step of a rule is about a hundred operations, each a call of a few functions of a namespace. Between two steps of
training, whose kernels have emptied the caches of the processor, these take several times as long as in a loop. Written
out they are a few lines, with the same operations in the same order, and so the same bits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np

from gradscale.policies import exponents
from gradscale.record import Array, fields, with_values

S = TypeVar("S")

CALLED = {"isfinite": math.isfinite, "floor": np.floor, "pow2_floor": exponents.pow2_floor, "bool_": np.bool_}
"""What the function may call."""


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """The result of an operation that is not known yet.

    Attributes:
        text: the operation in Python, with `{}` for each operand.
        operands: other results, and numbers.
        kind: its type: `np.float32`, `np.int32` or `np.bool_`.
    """

    text: str
    operands: tuple[Array, ...]
    kind: type

    __array_ufunc__ = None  # numpy's scalars leave their operators to this class

    def __bool__(self) -> NoReturn:
        raise TypeError("A rule may not branch on a value: it is known only when the step is run.")

    def __add__(self, other: Array) -> "Traced":
        return Traced("({} + {})", (self, other), self.kind)

    def __radd__(self, other: Array) -> "Traced":
        return Traced("({} + {})", (other, self), self.kind)

    def __sub__(self, other: Array) -> "Traced":
        return Traced("({} - {})", (self, other), self.kind)

    def __rsub__(self, other: Array) -> "Traced":
        return Traced("({} - {})", (other, self), self.kind)

    def __mul__(self, other: Array) -> "Traced":
        return Traced("({} * {})", (self, other), self.kind)

    def __rmul__(self, other: Array) -> "Traced":
        return Traced("({} * {})", (other, self), self.kind)

    def __truediv__(self, other: Array) -> "Traced":
        return Traced("({} / {})", (self, other), self.kind)

    def __rtruediv__(self, other: Array) -> "Traced":
        return Traced("({} / {})", (other, self), self.kind)

    def __lt__(self, other: Array) -> "Traced":
        return Traced("({} < {})", (self, other), np.bool_)

    def __le__(self, other: Array) -> "Traced":
        return Traced("({} <= {})", (self, other), np.bool_)

    def __gt__(self, other: Array) -> "Traced":
        return Traced("({} > {})", (self, other), np.bool_)

    def __ge__(self, other: Array) -> "Traced":
        return Traced("({} >= {})", (self, other), np.bool_)

    def __eq__(self, other: object) -> "Traced":  # type: ignore[override]
        return Traced("({} == {})", (self, other), np.bool_)

    __hash__ = object.__hash__


class Tracing:
    """The namespace of a rule that is traced."""

    @staticmethod
    def where(condition: Array, x: Array, y: Array, /) -> Array:
        """Returns a conditional expression. A number takes the type of the other, as in `Scalars.where`."""
        kind = next(value.kind for value in (x, y) if isinstance(value, Traced))
        x, y = (value if isinstance(value, Traced) else kind(value) for value in (x, y))
        return Traced("({} if {} else {})", (x, condition, y), kind)

    @staticmethod
    def logical_and(x: Array, y: Array, /) -> Array:
        """Returns whether both hold."""
        return Traced("({} and {})", (x, y), np.bool_)

    @staticmethod
    def logical_or(x: Array, y: Array, /) -> Array:
        """Returns whether one of the two holds."""
        return Traced("({} or {})", (x, y), np.bool_)

    @staticmethod
    def logical_not(x: Array, /) -> Array:
        """Returns whether `x` does not hold."""
        return Traced("(not {})", (x,), np.bool_)

    @staticmethod
    def isfinite(x: Array, /) -> Array:
        """Returns whether `x` is neither infinite nor NaN."""
        return Traced("isfinite({})", (x,), np.bool_)

    @staticmethod
    def floor(x: Array, /) -> Array:
        """Returns the largest whole number that is not above `x`."""
        return Traced("floor({})", (x,), np.float32)

    @staticmethod
    def pow2_floor(x: Array, /) -> Array:
        """Returns the largest power of two that is not above `x`."""
        return Traced("pow2_floor({})", (x,), np.float32)


def compiled(rule: Callable[[S, Any, Any], S], state: S, seen: Any) -> Callable[[S, Any], S]:
    """Returns a rule, a function of a state, of what was seen, and of a namespace, as one of the first two alone.

    It takes and returns records of numpy scalars. numpy's warnings must be off when it is called. `state` and `seen`
    are any two records that the rule could be called with.
    """
    after = rule(_inputs(state, "state"), _inputs(seen, "seen"), Tracing())
    names: dict[str, Any] = CALLED | {"State": type(after)}
    exec(_Source(names).function(after), names)
    return names["advance"]


def _inputs(record: Any, name: str) -> Any:
    """Returns a record whose numbers are those of the argument `name`."""
    types = {field.name: np.asarray(getattr(record, field.name)).dtype.type for field in fields(record)}
    return with_values(record, {leaf: Traced(f"{name}.{leaf}", (), kind) for leaf, kind in types.items()})


class _Source:
    """The text of a function. `names` are what it refers to, and gets the numbers that have no text of their own."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._numbers: dict[tuple[type, Array], str] = {}
        self._uses: dict[int, int] = {}
        self._same: dict[tuple[Any, ...], Traced] = {}
        self._merged: dict[int, Traced] = {}
        self._variables: dict[int, str] = {}
        self._lines: list[str] = []

    def function(self, after: Any) -> str:
        """Returns the text of `advance`, which returns `after`."""
        outcomes = [self._merge(getattr(after, field.name)) for field in fields(after)]
        for outcome in outcomes:
            self._count(outcome)
        texts = [self._text(outcome) for outcome in outcomes]
        flags = [isinstance(outcome, Traced) and outcome.kind is np.bool_ for outcome in outcomes]
        texts = [f"bool_({text})" if flag else text for text, flag in zip(texts, flags, strict=True)]
        body = "\n".join(f"    {line}" for line in self._lines)
        return f"def advance(state, seen):\n{body}\n    return State({', '.join(texts)})\n"

    def _merge(self, value: Array) -> Array:
        """Returns the value with one object for all operations that are the same."""
        if not isinstance(value, Traced):
            return value
        if id(value) not in self._merged:
            operands = tuple(map(self._merge, value.operands))
            key = value.text, *(id(each) if isinstance(each, Traced) else _typed(each) for each in operands)
            self._merged[id(value)] = self._same.setdefault(key, Traced(value.text, operands, value.kind))
        return self._merged[id(value)]

    def _count(self, value: Array) -> None:
        """Counts how often each result is used."""
        if isinstance(value, Traced):
            self._uses[id(value)] = self._uses.get(id(value), 0) + 1
            if self._uses[id(value)] == 1:
                for operand in value.operands:
                    self._count(operand)

    def _text(self, value: Array) -> str:
        """Returns the expression of a value; what is used more than once is a variable.

        What is used once stands where it is used: in a conditional expression, it is computed only if it is needed.
        """
        if not isinstance(value, Traced):
            return self._number(value)
        if id(value) in self._variables:
            return self._variables[id(value)]
        text = value.text.format(*map(self._text, value.operands))
        if self._uses[id(value)] == 1:
            return text
        name = self._variables[id(value)] = f"v{len(self._variables)}"
        self._lines.append(f"{name} = {text}")
        return name

    def _number(self, value: Array) -> str:
        if type(value) in (int, float, bool) and math.isfinite(value):
            return repr(value)
        name = self._numbers.setdefault(_typed(value), f"c{len(self._numbers)}")
        self._names[name] = value
        return name


def _typed(number: Array) -> tuple[type, Array]:
    """Returns a number as a key that one of another type does not equal."""
    return number.__class__, number
