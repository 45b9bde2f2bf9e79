"""The registry of adapters: which run, and that one requested that does not load fails the run."""

import pytest
from tests.conformance.adapters import REGISTERED, Registered, chosen, load

MISSING = {
    "numpy": REGISTERED["numpy"],
    "missing": Registered("tests.conformance.missing_adapter", ("no_such_package",)),
}


def test_all_adapters_whose_packages_are_installed_run_by_default() -> None:
    assert chosen(None, MISSING) == ["numpy"]
    assert chosen("", MISSING) == ["numpy"]


def test_the_numpy_adapter_always_runs_by_default() -> None:
    assert "numpy" in chosen(None)


def test_requested_adapters_run_whether_their_packages_are_installed_or_not() -> None:
    assert chosen("missing, numpy", MISSING) == ["missing", "numpy"]


def test_a_requested_adapter_that_does_not_load_fails_the_run() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"tests\.conformance\.missing_adapter"):
        load("missing", MISSING)


def test_an_adapter_that_nobody_registered_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names adapters that are registered\. Received: \['nmpy'\]"):
        chosen("nmpy")
