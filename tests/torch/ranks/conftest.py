"""Ranks are processes on the CPU, whatever device the other tests run on, and need a torch that is recent."""

import re
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
OLDEST = (2, 13)
"""Older ones lack parts of what these tests start: FSDP2 on a CPU, checkpoints without a process group, schedules."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.cpu_only("ranks talk over gloo, about tensors on the CPU"))
            if found < OLDEST:
                item.add_marker(pytest.mark.skip(reason=f"ranks are tested with torch 2.13 and newer, not {found}"))
