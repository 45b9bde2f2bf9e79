"""Two processes under Accelerate, whose DDP reduces the gradients on gloo."""

from pathlib import Path
from typing import Any

import pytest
from tests.integrations.accelerate.ranks import act_as_launched
from tests.integrations.accelerate.run import Run, ours
from tests.torch.ranks.launch import run_ranks


def train(policy: str, fused: bool, folder: str) -> dict[str, Any]:
    """Trains on one of the ranks; at step 1 the loss of rank 1 alone is not finite. Saves, goes on and goes back."""
    rank = act_as_launched()
    run = Run(ours(policy), fused=fused)
    run.train(2, bad_steps=[1] if rank == 1 else [])
    run.accelerator.save_state(folder)
    saved = run.scaler.state_dict()
    found = {
        "kind": str(run.accelerator.distributed_type),
        "skips": list(run.skips),
        "steps": run.schedule_steps,
        "norms": [norm for norm in run.norms if norm < float("inf")],
        "weights": [parameter.tolist() for parameter in run.parameters],
        "saved": saved,
    }
    run.train(1)
    run.accelerator.load_state(folder)
    return found | {"loaded": run.scaler.state_dict()}


@pytest.mark.parametrize(
    ("policy", "fused"), [("auto", True), pytest.param("torch:init_scale=1024.0", False, marks=pytest.mark.slow)]
)
def test_ranks_skip_together_and_stay_the_same(policy: str, fused: bool, tmp_path: Path) -> None:
    first, second = run_ranks(2, train, policy, fused, str(tmp_path / "state"), folder=tmp_path / "ranks")
    assert first["kind"].endswith("MULTI_CPU")
    assert first == second
    assert first["skips"][1]
    assert first["steps"] == 2 * first["skips"].count(False), "a prepared schedule takes a step for each rank"
    assert first["loaded"] == first["saved"]
