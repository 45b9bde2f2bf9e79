"""Two processes under a `Trainer`, whose DDP reduces the gradients on gloo."""

from pathlib import Path
from typing import Any

import pytest
from tests.integrations.accelerate.ranks import act_as_launched
from tests.torch.ranks.launch import run_ranks


def train(folder: str) -> dict[str, Any]:
    """Trains on one of the ranks; before step 1 a gradient of rank 1 alone overflows."""
    rank = act_as_launched()
    from tests.integrations.transformers.tiny import losses_of, ours, trainer_of

    trainer = trainer_of(Path(folder), ours(), max_steps=4, bad_steps=[1] if rank == 1 else [])
    trainer.train()
    return {
        "kind": str(trainer.accelerator.distributed_type),
        "rates": trainer.overflow.rates,
        "losses": losses_of(trainer),
        "weights": [parameter.tolist() for parameter in trainer.model.parameters()],
        "scaler": trainer.accelerator.scaler.state_dict(),
        "metrics": {name: trainer.accelerator.scaler.metrics()[name] for name in ("applied", "skipped")},
    }


@pytest.mark.slow
def test_ranks_skip_together_and_stay_the_same(tmp_path: Path) -> None:
    first, second = run_ranks(2, train, str(tmp_path / "out"), folder=tmp_path / "ranks")
    assert first["kind"].endswith("MULTI_CPU")
    assert first == second
    assert first["metrics"] == {"applied": 3.0, "skipped": 1.0}
    assert first["rates"][1] == first["rates"][2] > first["rates"][3]
