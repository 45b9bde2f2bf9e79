"""Cases that an adapter leaves out, and why: those it answers as its peer does, and those that would take too long."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from tests.conformance.adapters import Adapter, Difference, Table


def skip_if_different(adapter: Adapter, involved: Iterable[Difference]) -> None:
    """Skips a case that involves a documented difference of the adapter, which `test_differences` proves."""
    for difference in involved:
        if difference in adapter.differs:
            pytest.skip(f"documented difference: {adapter.differs[difference]}")


def skip_if_sampled(adapter: Adapter, table: Table, case: Any, cases: Sequence[Any]) -> None:
    """Skips all but the first case of each kind of policy, and size of parameters, where the adapter runs no more."""
    if table in adapter.sampled and not is_first(case, cases):
        pytest.skip("compiles every case: it runs the first of each kind of policy")


def is_first(case: Any, cases: Sequence[Any]) -> bool:
    """Returns whether a case is the first of its kind of policy and size of parameters."""
    return case is next(other for other in cases if _kind(other) == _kind(case))


def _kind(case: Any) -> tuple[Any, ...]:
    return type(case.policy), getattr(case, "elements", None)


def losses(values: Iterable[float]) -> set[Difference]:
    """Returns what is involved where the steps have these losses."""
    return set() if all(map(math.isfinite, values)) else {"losses"}
