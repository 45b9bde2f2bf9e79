"""Runs every test that takes an `adapter` once for each adapter of the run."""

import pytest
from tests.conformance.adapters import adapters

# Doctest collection would import the adapters of frameworks that are not installed.
collect_ignore_glob = ["*_adapter.py"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "adapter" in metafunc.fixturenames:
        found = adapters()
        metafunc.parametrize("adapter", list(found.values()), ids=list(found))
