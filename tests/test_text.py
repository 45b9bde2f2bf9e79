"""Values from files stay short in messages, whatever they are."""

from typing import Any

import pytest

from gradscale import Dynamic
from gradscale._text import short, shown, shown_keys
from gradscale.policies.contract import ScaleState
from gradscale.record import Record

DEEP: Any = 1
for _ in range(200):
    DEEP = [DEEP, DEEP]
LONG = {
    "text": "x" * 10**6,
    "bytes": b"\xff" * 10**6,
    "bytearray": bytearray(10**6),
    "list": list(range(10**6)),
    "dict": dict.fromkeys(range(10**6)),
    "mixed keys": {1: 2, "a": 3, None: 4},
    "integer": 10**10_000,
    "nested": DEEP,
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_value_is_cut(name: str) -> None:
    assert len(shown(LONG[name])) < 400
    assert shown(LONG[name]).endswith(f"({type(LONG[name]).__name__})")


def test_a_short_value_is_whole() -> None:
    assert short({"scale": 1.5, "names": ["a"], "data": b"\x00"}) == "{'data': b'\\x00', 'names': ['a'], 'scale': 1.5}"


def test_keys_are_counted_beyond_the_first_twenty() -> None:
    assert shown_keys(range(10, 32)).endswith("'29', and 2 more]")
    assert len(shown_keys(f"{'k' * 10**5}{i}" for i in range(100))) < 3000


@pytest.mark.parametrize("name", [name for name in LONG if name != "list"])  # which would be a vector of scales
@pytest.mark.parametrize("record", [Dynamic, ScaleState])
def test_a_long_value_in_a_saved_record_is_cut(record: type[Record], name: str) -> None:
    saved = Dynamic().to_dict() if record is Dynamic else Dynamic().start().to_dict()
    for key in saved:
        with pytest.raises((TypeError, ValueError)) as raised:
            record.from_dict({**saved, key: LONG[name]})
        assert len(str(raised.value)) < 1000
    with pytest.raises(ValueError, match="has no such key") as raised:
        record.from_dict({**saved, **{f"{'k' * 1000}{index}": 1 for index in range(1000)}})
    assert len(str(raised.value)) < 3000
