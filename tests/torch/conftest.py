"""Every test starts from the same random numbers, on one thread: threads cost small models more than they save.

With `--device`, the tests run there: tensors are made on that device unless a test says otherwise.
"""

from collections.abc import Iterator

import pytest
import torch
from tests.torch.sim.kernels import NAME as SIMULATED
from torch.utils import backend_registration

from gradscale.torch import host

# What the simulated device is made of.
SIMULATES = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
collect_ignore = [] if SIMULATES else ["sim/device.py"]


def pytest_configure(config: pytest.Config) -> None:
    _set_default_device(_device(config))  # for tensors that test files make when they are imported


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that is not for the device, by its marker, with the reason that is given there."""
    device = _device(item.config)
    for marker in item.iter_markers("cpu_only") if device.type != "cpu" else ():
        pytest.skip(f"CPU only: {marker.args[0]}")
    for marker in item.iter_markers("not_simulated") if device.type == SIMULATED else ():
        pytest.skip(f"not simulated: {marker.args[0]}")
    if item.get_closest_marker("simulated_only") and device.type != SIMULATED:
        pytest.skip("for the simulated device: make test-device")


def _device(config: pytest.Config) -> torch.device:
    name = str(config.getoption("--device"))
    if name.startswith(SIMULATED):
        if not SIMULATES:
            raise pytest.UsageError(f"`--device {name}` needs torch 2.10 or newer. Found: torch {torch.__version__}.")
        from tests.torch.sim import device

        device.install()
    return torch.device(name)


def _set_default_device(device: torch.device) -> None:
    # Not the CPU: the context of a default device slows down every call of torch.
    if device.type != "cpu":
        torch.set_default_device(device)


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """Where the test runs: the CPU, or what `--device` names. Tensors are made there by default."""
    return _device(pytestconfig)


@pytest.fixture(autouse=True)
def _made_on_the_device(device: torch.device) -> None:
    _set_default_device(device)  # again, since a test may have set another


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
def either_way(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test twice: as on the CPU, and as on an accelerator, where the host may not look at any number."""
    if device.type != "cpu" and request.param:
        pytest.skip("CPU only: the scale is not in host memory here")
    if not request.param:
        monkeypatch.setattr(host, "in_host_memory", lambda device: False)


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the scaler take the CPU for an accelerator, whose numbers the host may not look at."""
    monkeypatch.setattr(host, "in_host_memory", lambda device: False)
