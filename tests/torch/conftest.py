"""Every test starts from the same random numbers, on one thread: threads cost small models more than they save."""

from collections.abc import Iterator

import pytest
import torch

from gradscale.torch.step import host_copy


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[True, False], ids=["in host memory", "on a device"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test twice: as on the CPU, and as on an accelerator, where the host may not look at any number."""
    if not request.param:
        monkeypatch.setattr(host_copy, "in_host_memory", lambda device: False)


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the scaler take the CPU for an accelerator, whose numbers the host may not look at."""
    monkeypatch.setattr(host_copy, "in_host_memory", lambda device: False)
