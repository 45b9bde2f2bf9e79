"""`gradscale formats`."""

import json

from typer.testing import CliRunner

from gradscale.cli import app
from gradscale.cli.formats import NOTES
from gradscale.formats import FORMATS


def lines() -> list[str]:
    shown = CliRunner().invoke(app, ["formats"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    return shown.output.splitlines()


def test_every_format_is_shown_with_its_numbers() -> None:
    rows = {line.split()[0]: line.split() for line in reversed(lines()) if line.strip()}
    assert rows["FP16"] == ["FP16", "16", "65504", "2^-14", "2^-24", "=", "6.0e-08", "40", "inf"]
    assert rows["FP8_E4M3"] == ["FP8_E4M3", "8", "448", "2^-6", "2^-9", "=", "2.0e-03", "18", "NaN"]
    assert rows["FP4_E2M1"][-2:] == ["the", "max"]
    assert all(known.name in rows for known in FORMATS)


def test_every_format_says_what_it_is_for() -> None:
    assert list(NOTES) == [known.name for known in FORMATS]
    text = " ".join(lines())
    assert "RL fine-tuning" in text
    assert "one scale, for the loss" in text


def test_json_has_every_format_with_its_numbers() -> None:
    listed = json.loads(CliRunner().invoke(app, ["formats", "--json"]).stdout)
    assert [one["name"] for one in listed] == [known.name for known in FORMATS]
    fp16 = next(one for one in listed if one["name"] == "FP16")
    assert fp16 == {
        "name": "FP16",
        "bits": 16,
        "max": 65504.0,
        "smallest_normal": 2.0**-14,
        "smallest_subnormal": 2.0**-24,
        "binades": 40,
        "overflow": "inf",
        "used_for": NOTES["FP16"][0],
        "loss_scaling": NOTES["FP16"][1],
    }
