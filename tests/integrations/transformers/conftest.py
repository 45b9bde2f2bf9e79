"""These tests need Transformers, and do not reach the network."""

from importlib.util import find_spec

import pytest
from tests.integrations.accelerate.state import (
    _fresh_state,  # noqa: F401
    _one_thread_and_the_same_random_numbers,  # noqa: F401
)

collect_ignore_glob = [] if find_spec("transformers") else ["*.py"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
