"""Traced rules in the language of Triton, whose kernels then do the same operations as the host, with the same bits."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gradscale.policies.compiled import PYTHON, Source, Traced
from gradscale.record import Array

KINDS: dict[Any, str] = {np.float32: "tl.float32", np.int32: "tl.int32", np.bool_: "tl.int1"}
"""The types of a rule, in Triton."""


class TritonSource(Source):
    """The text of operations in Triton, on blocks of any shape.

    `isfinite`, `floor` and `pow2_floor` are functions of the module that runs it.
    """

    operations: ClassVar[Mapping[str, str]] = PYTHON | {
        "div": "tl.div_rn({}, {})",  # `/` may be an approximation
        "where": "tl.where({}, {}, {})",
        "and": "({} & {})",
        "or": "({} | {})",
        "not": "({} == 0)",
        "pow2_floor": "pow2_floor({})",
    }

    def number(self, value: Array, kind: type | None) -> str:
        """Returns a number as a constant of its own type, or of `kind`, as numpy converts Python's."""
        # With its type: Triton makes a float64 of a literal that is subnormal in float32, and infinity has no literal.
        own: Any = {bool: np.bool_, int: kind, float: kind}.get(value.__class__, value.__class__)
        if own not in KINDS or (value.__class__ is float and own is not np.float32):
            raise TypeError(f"A kernel computes in float32, int32 and bool. Received: {value!r}, to meet {kind}.")
        number = own(value).item()
        return f"tl.full((), {number if np.isfinite(number) else f'float({str(number)!r})'}, {KINDS[own]})"

    def operation(self, value: Traced, operands: Sequence[str]) -> str:
        """Returns the text of an operation. Raises where numpy would widen an operand, or the result is a float64."""
        kinds = {each.kind for each in value.operands[value.operation == "where" :] if isinstance(each, Traced)}
        if len(kinds) > 1 or value.kind not in KINDS:
            raise TypeError(f"A kernel computes in float32, int32 and bool, unmixed. Received: {value.operation}.")
        if not value.operands:
            return value.operation.replace(".", "_")
        return super().operation(value, operands)
