"""Fixtures of the tests on top of Accelerate."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps its state in classes, so one test would see what another has set."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _one_thread_and_the_same_random_numbers() -> Iterator[None]:
    """Threads cost small models more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
