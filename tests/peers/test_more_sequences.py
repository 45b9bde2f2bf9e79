"""Presets against further runs of their systems: odd factors, compiled code, and the ends of the number range."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.peers.test_sequences import states_of

ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "more_peer_sequences.json").read_text())


def readable(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row with its amax as numbers, infinity included."""
    return row | {"amax": [float(value) for value in row["amax"]]} if "amax" in row else row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_preset_gives_the_scales_of_its_peer(row: dict[str, Any]) -> None:
    for step, (state, wanted) in enumerate(zip(states_of(readable(row)), row["expected_scale"], strict=True)):
        scale = float(state.scale)
        assert scale == float(wanted) or (math.isnan(scale) and wanted == "nan"), f"step {step}"


@pytest.mark.parametrize("row", [row for row in ROWS if "growth_tracker" in row], ids=lambda row: row["id"])
def test_clean_steps_are_the_growth_tracker_of_the_peer(row: dict[str, Any]) -> None:
    assert [int(state.clean_steps) for state in states_of(row)] == row["growth_tracker"]


@pytest.mark.parametrize("row", [row for row in ROWS if "decr_count" in row], ids=lambda row: row["id"])
def test_credits_are_what_the_overflows_counted_by_paddle_leave(row: dict[str, Any]) -> None:
    every = row["config"].get("decr_every_n_nan_or_inf", 1)
    assert [every - int(state.credits) for state in states_of(row)] == row["decr_count"]
