"""A scaler's own JSON file is read back, and anything else in its place is refused."""

import json
from pathlib import Path

import pytest

from gradscale import Dynamic, Static
from gradscale.engine.saved import write_saved
from gradscale.engine.saved_file import LARGEST_FILE, read_file


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    policy = Dynamic(init_scale=8.0)
    (tmp_path / "scaler").write_text(json.dumps(write_saved(policy, policy.start())))
    assert read_file(tmp_path / "scaler")[:2] == (policy, policy.start())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must name a JSON file"),
        ("\xff", "must name a JSON file"),
        ("[" * 100_000, "must name a JSON file"),
        ('{"policy": ' + "9" * 10_000, "must name a JSON file"),
        (" " * (LARGEST_FILE + 1), "takes at most 1048576 bytes"),
        ("[]", "takes what `state_dict` returned. Received: list"),
        ('{"policy": 1, "state": {}}', "`policy` of a saved LossScaler must be a mapping. Received: 1"),
        (
            json.dumps({"policy": Static(2.0).to_dict() | {"scale": "x"}, "state": {}}),
            "`Static.scale` must be a number",
        ),
    ],
)
def test_anything_else_is_a_value_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "scaler").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        read_file(tmp_path / "scaler")


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="/dev/zero, which is larger"):
        read_file("/dev/zero")
