"""Rules and decisions, traced once and printed: as Python functions on numpy scalars, or for another language.

A step of a rule is about a hundred operations, each a call of a few functions of a namespace. Between two steps of
training, whose kernels have emptied the caches of the processor, these take several times as long as in a loop. Written
out they are a few lines, with the same operations in the same order, and so the same bits. `triton_text` prints the
same operations for a GPU.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, cast

import numpy as np

from gradscale.record import Array, fields, with_values

CALLED = {
    "isfinite": math.isfinite,
    "floor": np.floor,
    "frexp": math.frexp,
    "ldexp": math.ldexp,
    "bool_": np.bool_,
    "float32": np.float32,
    "float64": np.float64,
}
"""What the function may call."""

PYTHON = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "div": "({} / {})",
    "lt": "({} < {})",
    "le": "({} <= {})",
    "gt": "({} > {})",
    "ge": "({} >= {})",
    "eq": "({} == {})",
    "where": "({1} if {0} else {2})",
    "and": "({} and {})",
    "or": "({} or {})",
    "not": "(not {})",
    "isfinite": "isfinite({})",
    "floor": "floor({})",
    # Read off the exponent, between the ends of the search in `arithmetic.pow2_floor`.
    "pow2_floor": "(float32(ldexp(0.5, frexp(min(max(x, 2.0**-126), 2.0**126))[1])) if isfinite(x := {}) else x * 0)",
    "float32": "float32({})",
    "float64": "float64({})",
}
"""The text of each operation in Python."""


def _operator(operation: str, kind: type | None = None, *, swapped: bool = False) -> Any:
    """Returns a method for an infix operator, whose result is of `kind`, or of the type of its left operand."""

    def method(self: "Traced", other: Array) -> "Traced":
        return Traced(operation, (other, self) if swapped else (self, other), kind or self.kind)

    return method


def _function(operation: str, kind: type = np.bool_) -> Any:
    """Returns a function of a namespace, whose result is of `kind`."""
    return staticmethod(lambda *operands: Traced(operation, operands, kind))


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """The result of an operation that is not known yet.

    Attributes:
        operation: a key of `PYTHON`; of an input, its name, as in `state.scale`.
        operands: other results, and numbers. An input has none.
        kind: its type: `np.float32`, `np.float64`, `np.int32` or `np.bool_`.
    """

    operation: str
    operands: tuple[Array, ...]
    kind: type

    __array_ufunc__ = None  # numpy's scalars leave their operators to this class

    def __bool__(self) -> NoReturn:
        raise TypeError("A rule may not branch on a value: it is known only when the step is run.")

    __add__, __radd__ = _operator("add"), _operator("add", swapped=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", swapped=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", swapped=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", swapped=True)
    __lt__, __le__ = _operator("lt", np.bool_), _operator("le", np.bool_)
    __gt__, __ge__ = _operator("gt", np.bool_), _operator("ge", np.bool_)
    __eq__ = _operator("eq", np.bool_)
    __hash__ = object.__hash__


class Tracing:
    """The namespace of a rule that is traced."""

    @staticmethod
    def where(condition: Array, x: Array, y: Array, /) -> Array:
        """Returns a conditional expression. A number takes the type of the other, as in `Scalars.where`."""
        kind = next(value.kind for value in (x, y) if isinstance(value, Traced))
        x, y = (value if isinstance(value, Traced) else kind(value) for value in (x, y))
        return Traced("where", (condition, x, y), kind)

    @staticmethod
    def asarray(x: Array, /, dtype: type) -> Array:
        """Returns `x` in the type `dtype`."""
        return Traced(dtype.__name__, (x,), dtype)

    logical_and, logical_or, logical_not = _function("and"), _function("or"), _function("not")
    isfinite, floor, pow2_floor = (
        _function("isfinite"),
        _function("floor", np.float32),
        _function("pow2_floor", np.float32),
    )
    float32, float64 = np.float32, np.float64


def traced(function: Callable[..., Any], operands: Mapping[str, Any]) -> Any:
    """Returns what a function of records, numbers and a namespace, in this order, returns for unknown operands.

    `operands` are any that the function could be called with; fields that are None stay so.
    """
    return function(*(_input(operand, name) for name, operand in operands.items()), Tracing())


def compiled(function: Callable[..., Any], **operands: Any) -> Callable[..., Any]:
    """Returns a function of records, numbers and a namespace, in this order, as one without the namespace.

    It takes numpy scalars, and records of them, and returns a scalar, or a record or tuple of them. numpy's warnings
    must be off when it is called. `operands` are as in `traced`.
    """
    outcome = traced(function, operands)
    source = Source()
    single = isinstance(outcome, Traced)
    outcomes: list[Any] = [outcome] if single else _values(outcome)
    texts = source.texts(outcomes)
    flags = [isinstance(each, Traced) and each.kind is np.bool_ for each in outcomes]
    texts = [f"bool_({text})" if flag else text for text, flag in zip(texts, flags, strict=True)]
    body = "\n".join(f"    {line}" for line in source.lines)
    kind = "" if outcome.__class__ is tuple else "Outcome"
    returned = texts[0] if single else f"{kind}({', '.join(texts)})"
    names: dict[str, Any] = CALLED | source.named | {"Outcome": outcome.__class__}
    exec(f"def run({', '.join(operands)}):\n{body}\n    return {returned}\n", names)
    return names["run"]


def _input(operand: Any, name: str) -> Any:
    """Returns an operand whose numbers are those of the argument `name`."""
    if isinstance(operand, np.generic):
        return Traced(name, (), cast(Any, operand).dtype.type)
    is_tuple = hasattr(operand, "_asdict")  # a named one; else a dataclass
    named = operand._asdict() if is_tuple else {each.name: getattr(operand, each.name) for each in fields(operand)}
    traced = {
        leaf: Traced(f"{name}.{leaf}", (), np.asarray(value).dtype.type)
        for leaf, value in named.items()
        if value is not None
    }
    return operand._replace(**traced) if is_tuple else with_values(operand, traced)


class Source:
    """The text of operations, in Python.

    Attributes:
        lines: assignments of the results that are used more than once, in order.
        named: the numbers that have no text of their own, by the names that the text has for them.
    """

    operations: ClassVar[Mapping[str, str]] = PYTHON

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.named: dict[str, Any] = {}
        self._numbers: dict[tuple[type, Array], str] = {}
        self._uses: dict[int, int] = {}
        self._same: dict[tuple[Any, ...], Traced] = {}
        self._merged: dict[int, Traced] = {}
        self._variables: dict[int, str] = {}

    def texts(self, outcomes: Sequence[Array]) -> list[str]:
        """Returns an expression for each of `outcomes`, to be evaluated after `lines`."""
        merged = list(map(self._merge, outcomes))
        for each in merged:
            self._count(each)
        return list(map(self._text, merged))

    def number(self, value: Array, kind: type | None) -> str:
        """Returns the text of a number, which meets operands of `kind`."""
        del kind  # numpy converts it
        if type(value) in (int, float, bool) and math.isfinite(value):
            return repr(value)
        name = self._numbers.setdefault(_typed(value), f"c{len(self._numbers)}")
        self.named[name] = value
        return name

    def operation(self, value: Traced, operands: Sequence[str]) -> str:
        """Returns the text of an operation on operands of which there is text, or of an input."""
        return self.operations.get(value.operation, value.operation).format(*operands)

    def _merge(self, value: Array) -> Array:
        """Returns the value with one object for all operations that are the same."""
        if not isinstance(value, Traced):
            return value
        if id(value) not in self._merged:
            operands = tuple(map(self._merge, value.operands))
            key = value.operation, *(id(each) if isinstance(each, Traced) else _typed(each) for each in operands)
            self._merged[id(value)] = self._same.setdefault(key, Traced(value.operation, operands, value.kind))
        return self._merged[id(value)]

    def _count(self, value: Array) -> None:
        """Counts how often each result is used."""
        if isinstance(value, Traced):
            self._uses[id(value)] = self._uses.get(id(value), 0) + 1
            if self._uses[id(value)] == 1:
                for operand in value.operands:
                    self._count(operand)

    def _text(self, value: Array, kind: type | None = None) -> str:
        """Returns the expression of a value; what is used more than once is a variable.

        What is used once stands where it is used: in a conditional expression, it is computed only if it is needed.
        """
        if not isinstance(value, Traced):
            return self.number(value, kind)
        if id(value) in self._variables:
            return self._variables[id(value)]
        met = next((each.kind for each in value.operands[::-1] if isinstance(each, Traced)), None)
        text = self.operation(value, [self._text(each, met) for each in value.operands])
        if self._uses[id(value)] == 1:
            return text
        name = self._variables[id(value)] = f"v{len(self._variables)}"
        self.lines.append(f"{name} = {text}")
        return name


def _values(outcome: Any) -> list[Any]:
    return list(outcome) if outcome.__class__ is tuple else [getattr(outcome, field.name) for field in fields(outcome)]


def _typed(number: Array) -> tuple[type, Array]:
    """Returns a number as a key that one of another type does not equal."""
    return number.__class__, number
