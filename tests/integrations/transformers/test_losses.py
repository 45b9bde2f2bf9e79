"""Losses that are not finite under Transformers: a policy keeps its scale."""

from pathlib import Path
from typing import Any

import pytest
from tests.integrations.transformers.tiny import ours, trainer_of

from gradscale import Status

BAD = (1, 2, 3)
"""The last three of four steps."""


@pytest.mark.parametrize("policy", ["auto", "dynamic:init_scale=1024"])
def test_three_nan_losses_leave_the_scale_as_it_is(policy: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ours(policy), max_steps=4)
    own = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs) * (float("nan") if trainer.state.global_step in BAD else 1.0)

    trainer.compute_loss = compute_loss
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len({row["gradscale/scale"] for row in rows}) == 1
    assert [row["gradscale/skipped"] for row in rows] == [0, 1, 2, 3]
    assert trainer.accelerator.scaler.last.status() is Status.NONFINITE_LOSS
