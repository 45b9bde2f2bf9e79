"""Ranks are processes on the CPU, whatever device the other tests run on."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.cpu_only("ranks talk over gloo, about tensors on the CPU"))
