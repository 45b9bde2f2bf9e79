"""Runs every test that takes an `adapter` once for each adapter of the run."""

from collections.abc import Sequence
from typing import Any

import pytest
from tests.conformance.adapters import adapters
from tests.conformance.results import RESULT_CASES
from tests.conformance.scales import SCALE_CASES
from tests.conformance.skips import is_first
from tests.conformance.states import STATE_CASES
from tests.conformance.updates import UPDATE_CASES

# Doctest collection would import the adapters of frameworks that are not installed.
collect_ignore_glob = ["*_adapter.py"]

SLOW = {"jax-jit", "keras-tensorflow", "keras-jax"}
"""Adapters that compile every case: in `make test` they run the first of each kind of policy, and the others with the
slow tests. All cases run in `make test` on JAX without `jit` and on Keras with torch."""

TABLES: tuple[Sequence[Any], ...] = (RESULT_CASES, SCALE_CASES, STATE_CASES, UPDATE_CASES)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "adapter" in metafunc.fixturenames:
        found = adapters()
        metafunc.parametrize("adapter", list(found.values()), ids=list(found))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = [adapter for name, adapter in adapters().items() if name in SLOW]
    for item in items:
        params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        if params.get("adapter") in slow:
            case = params.get("case")
            tables = [cases for cases in TABLES if any(case is each for each in cases)]
            if any(not is_first(case, cases) for cases in tables):
                item.add_marker(pytest.mark.slow)
