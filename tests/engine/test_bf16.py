"""The note that BF16 needs no loss scaling."""

import logging

import pytest

from gradscale import BF16, FP16, CheckOnly, Dynamic, Headroom, NoScaling, Policy, Static
from gradscale.engine import bf16


@pytest.fixture(autouse=True)
def _not_noted_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16, "_noted", [])


def test_it_is_logged_once_and_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        bf16.note_bf16(Dynamic(), "A scaler scales in BF16.", "Leave it out.")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages[0].startswith("A scaler scales in BF16. BF16 has the range of float32, ")
    assert "Leave it out. To go on skipping steps" in caplog.messages[0]
    assert "`policy=CheckOnly()`" in caplog.messages[0]


@pytest.mark.parametrize(
    ("policy", "noted"),
    [
        (Headroom(), True),
        (Headroom(FP16), True),
        (Dynamic(), True),
        (Static(8.0), True),
        (NoScaling(), False),
        (CheckOnly(), False),
        (Headroom(BF16), False),
    ],
)
def test_it_is_for_policies_that_scale_for_fp16(policy: Policy, noted: bool, caplog: pytest.LogCaptureFixture) -> None:
    bf16.note_bf16(policy, "A scaler scales in BF16.", "Leave it out.")
    assert len(caplog.messages) == noted
