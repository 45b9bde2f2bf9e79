"""DeepSpeed's engine, run anew, in the environment of `make test-deepspeed`."""

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.peers.rows import rows
from tests.peers.test_deepspeed_checkpoints import continued
from tests.peers.test_sequences import scales_of

pytest.importorskip("deepspeed")
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def engine_rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the installed version does. A process of its own: DeepSpeed changes torch, and warns of what it uses."""
    path = tmp_path_factory.mktemp("deepspeed") / "rows.json"
    command = [sys.executable, "-m", "tests.peers.deepspeed_engine", str(path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-8000:]
    return json.loads(path.read_text())


def test_the_scales_are_those_that_were_recorded(engine_rows: list[dict[str, Any]]) -> None:
    recorded = rows("deepspeed_engine.json")
    assert [row["id"] for row in engine_rows] == [row["id"] for row in recorded]
    assert [row["expected_scale"] for row in engine_rows] == [row["expected_scale"] for row in recorded]


def test_the_preset_gives_the_scales_of_the_engine(engine_rows: list[dict[str, Any]]) -> None:
    for row in engine_rows:
        assert scales_of(row) == row["expected_scale"], row["id"]


def test_a_checkpoint_continues_with_the_scales_of_the_engine(engine_rows: list[dict[str, Any]]) -> None:
    for row in engine_rows:
        begin = row["saved_after"]
        found = continued(base64.b64decode(row["checkpoint"]), row["found_inf"][begin:])
        assert found == row["expected_scale"][begin - 1 :], row["id"]
