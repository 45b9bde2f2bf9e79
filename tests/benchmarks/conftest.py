"""One thread: threads cost small steps more than they save. Without torch, only the tests that need none are run."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

HAS_TORCH = find_spec("torch") is not None

collect_ignore = (
    [] if HAS_TORCH else [f"test_{name}.py" for name in ("compare", "sides", "step", "study", "targets", "traffic")]
)


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    if not HAS_TORCH:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
