"""Checkpoints that DeepSpeed's engine wrote in the middle of a run: read, and continued with the engine's scales."""

import base64
from typing import Any

import numpy as np
import pytest
from tests.peers.rows import rows
from tests.stories import next_of

from gradscale import import_state
from gradscale.peers.ladder import Ladder
from gradscale.policies.contract import Seen

ROWS = rows("deepspeed_engine.json")


def continued(saved: Any, found_inf: list[int]) -> list[float]:
    """Returns the scale that a checkpoint holds, and those after each of these steps."""
    policy, state = import_state("deepspeed", saved)
    scales = [float(state.scale)]
    for overflow in found_inf:
        state = next_of(policy, state, Seen(finite=np.bool_(not overflow)))
        scales.append(float(state.scale))
    return scales


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_a_checkpoint_continues_with_the_scales_of_the_engine(row: dict[str, Any]) -> None:
    begin = row["saved_after"]
    found = continued(base64.b64decode(row["checkpoint"]), row["found_inf"][begin:])
    assert found == row["expected_scale"][begin - 1 :]
    assert len(set(found)) > 1


@pytest.mark.parametrize("row", [row for row in ROWS if row["class"] == "config"], ids=lambda row: row["id"])
def test_the_settings_of_zero_are_in_its_checkpoint(row: dict[str, Any]) -> None:
    policy, _ = import_state("deepspeed", base64.b64decode(row["checkpoint"]))
    assert isinstance(policy, Ladder)
    settings = {"hysteresis": policy.hysteresis, "min_loss_scale": policy.floor}
    settings["consecutive_hysteresis"] = policy.refill == "clean"
    assert settings == {"min_loss_scale": 1, "consecutive_hysteresis": False} | {
        name: value for name, value in row["config"].items() if name in settings
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_a_loss_scaler_of_pytorch_loads_the_checkpoint(row: dict[str, Any]) -> None:
    LossScaler = pytest.importorskip("gradscale.torch").LossScaler
    scaler = LossScaler()
    scaler.load_state_dict(base64.b64decode(row["checkpoint"]), system="deepspeed")
    assert float(scaler.loss_scale) == row["expected_scale"][row["saved_after"] - 1]
