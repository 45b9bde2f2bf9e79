"""Short runs whose first gradients overflow at torch's first scale: which steps are lost."""

from pathlib import Path
from typing import Any

import pytest
from tests.integrations.transformers.tiny import ours, trainer_of
from torch import Tensor, nn

from gradscale import Policy


def large_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Returns a loss whose FP16 backward pass overflows at torch's first scale."""
    return 300 * nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def trained(folder: Path, policy: Policy | str, steps: int, retries: int = 0, **kwargs: Any) -> Any:
    trainer = trainer_of(folder, ours(policy, retries=retries), max_steps=steps, **kwargs)
    trainer.compute_loss_func = large_loss
    trainer.train()
    return trainer


@pytest.mark.parametrize("steps", [3, 10, 50])
def test_no_step_is_lost(steps: int, tmp_path: Path) -> None:
    trainer = trained(tmp_path, "auto", steps)
    assert trainer.accelerator.scaler.metrics()["skipped"] == 0
    assert trainer.lr_scheduler.last_epoch == steps


def test_no_step_is_lost_with_accumulated_gradients(tmp_path: Path) -> None:
    trainer = trained(tmp_path, "auto", 3, gradient_accumulation_steps=2)
    assert trainer.accelerator.scaler.metrics()["skipped"] == 0


@pytest.mark.parametrize("steps", [3, 10, 50])
def test_early_steps_are_lost_under_torchs_rule(steps: int, tmp_path: Path) -> None:
    trainer = trained(tmp_path, "torch", steps)
    assert trainer.accelerator.scaler.metrics()["skipped"] >= 3
    assert trainer.lr_scheduler.last_epoch < steps


def test_retries_can_be_asked_for(tmp_path: Path) -> None:
    trainer = trained(tmp_path, "torch", 3, retries=20)
    assert trainer.accelerator.scaler.metrics()["skipped"] == 0
