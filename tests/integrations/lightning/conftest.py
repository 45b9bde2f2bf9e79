"""Every test of Lightning starts from the same random numbers, on one thread, and ignores what Lightning warns of."""

import logging
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
collect_ignore_glob = [] if find_spec("lightning") else ["*.py"]

IGNORED = [
    r"ignore:The '.*dataloader' does not have many workers",
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"ignore:You're resuming from a checkpoint that ended before the epoch ended",
    r"ignore:The number of training batches \(\d+\) is smaller than the logging interval",
    r"ignore:You passed `Trainer\(accelerator='cpu', precision='16-mixed'\)` but AMP with fp16 is not supported on CPU",
    r"ignore:You passed `Fabric\(accelerator='cpu', precision='16-mixed'\)` but AMP with fp16 is not supported on CPU",
    r"ignore:`training_step` returned `None`",
    r"ignore:There is a wandb run already in progress",
]
"""Of Lightning, about runs as small as these."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            for text in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture(autouse=True)
def _the_same_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
