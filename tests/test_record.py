"""Records: the dict form of policies and states, and every way a dict can be wrong."""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscale import BF16, FP16, Dynamic, Format, NoScaling, ScaleState, Static
from gradscale.peers.ladder import LadderState
from gradscale.record import SCHEMA, Record, fields, leaf, number_type, numbers, place, with_values


@dataclass(frozen=True, slots=True)
class Sample(Record):
    """A record with one setting of every kind."""

    number: float = 1.0
    count: int = 1
    flag: bool = False
    choice: Literal["a", "b"] = "a"
    text: str = "t"
    format: Format = FP16
    maybe: float | None = None


STATE = ScaleState(
    scale=np.float32(1024),
    clean_steps=np.int32(7),
    credits=np.int32(3),
    applied=np.int32(11),
    skipped=np.int32(5),
    consecutive_skips=np.int32(2),
    stuck=np.bool_(True),
)
SAMPLE = Sample(number=2.5, count=7, flag=True, choice="b", text="u", format=BF16, maybe=0.5)
DYNAMIC = Dynamic(
    init_scale=512.0,
    growth_factor=3.0,
    backoff_factor=0.25,
    growth_interval=17,
    hysteresis=4,
    refill="clean",
    min_scale=0.5,
    max_scale=4096.0,
)


def through_json(record: Any) -> Any:
    return type(record).from_dict(json.loads(json.dumps(record.to_dict(), allow_nan=False)))


def edited(record: Record, **changes: Any) -> dict[str, Any]:
    return {**record.to_dict(), **changes}


@pytest.mark.parametrize("record", [STATE, SAMPLE, DYNAMIC], ids=lambda record: type(record).__name__)
def test_a_record_with_no_field_at_its_default_comes_back_through_json_unchanged(record: Any) -> None:
    for field in fields(record):
        assert getattr(record, field.name) != field.default, f"{field.name} is at its default: this test proves nothing"
    read = through_json(record)
    assert read == record
    for field in fields(record):
        assert type(getattr(read, field.name)) is type(getattr(record, field.name))


@pytest.mark.parametrize("record", [Sample(), NoScaling(), Static(8.0)], ids=lambda record: type(record).__name__)
def test_a_record_at_its_defaults_comes_back_through_json_unchanged(record: Any) -> None:
    assert through_json(record) == record


def test_the_dict_form_is_plain_and_says_what_it_is() -> None:
    assert STATE.to_dict() == {
        "schema": SCHEMA,
        "kind": "ScaleState",
        "scale": 1024.0,
        "clean_steps": 7,
        "credits": 3,
        "applied": 11,
        "skipped": 5,
        "consecutive_skips": 2,
        "stuck": True,
    }
    assert {type(value) for value in STATE.to_dict().values()} == {int, str, float, bool}
    assert SAMPLE.to_dict()["format"] == "BF16"
    assert Sample().to_dict()["maybe"] is None


def test_infinity_is_written_as_a_string_that_json_can_hold() -> None:
    record = Sample(number=math.inf)
    assert record.to_dict()["number"] == "inf"
    assert through_json(record) == record
    state = dataclasses.replace(STATE, scale=np.float32(np.inf))
    assert state.to_dict()["scale"] == "inf"
    assert through_json(state) == state


def test_a_state_of_vectors_comes_back_as_vectors() -> None:
    state = ScaleState(
        scale=np.array([1, np.inf], np.float32),
        clean_steps=np.array([1, 2], np.int32),
        credits=np.array([3, 4], np.int32),
        applied=np.array([5, 6], np.int32),
        skipped=np.array([7, 8], np.int32),
        consecutive_skips=np.array([9, 10], np.int32),
        stuck=np.array([True, False]),
    )
    assert state.to_dict()["scale"] == [1.0, "inf"]
    read = through_json(state)
    for field in fields(state):
        np.testing.assert_array_equal(getattr(read, field.name), getattr(state, field.name))
        assert getattr(read, field.name).dtype == getattr(state, field.name).dtype


def test_a_scale_that_float32_cannot_hold_comes_back_as_float64() -> None:
    state = dataclasses.replace(STATE, scale=np.float64(0.1))
    read = through_json(state)
    assert read.scale == 0.1
    assert read.scale.dtype == np.float64


def test_counters_of_a_ladder_may_be_negative() -> None:
    state = LadderState(scale=np.float32(1), clean_steps=np.int32(-1), credits=np.int32(-5))
    assert through_json(state) == state


@given(
    scale=st.floats(2.0**-126, 2.0**126, width=32),
    counters=st.lists(st.integers(0, 2**31 - 1), min_size=5, max_size=5),
    stuck=st.booleans(),
)
def test_any_state_comes_back_unchanged(scale: float, counters: list[int], stuck: bool) -> None:
    state = ScaleState(np.float32(scale), *map(np.int32, counters), stuck=np.bool_(stuck))
    assert through_json(state) == state


@pytest.mark.parametrize("mapping", [None, [("schema", 1)], "text", 7, {1, 2}])
def test_something_that_is_not_a_mapping_is_refused(mapping: Any) -> None:
    with pytest.raises(TypeError, match=r"`ScaleState.from_dict` takes a mapping. Received: \w+\."):
        ScaleState.from_dict(mapping)


@pytest.mark.parametrize("key", ["schema", "kind"])
def test_a_mapping_without_its_header_is_refused(key: str) -> None:
    mapping = STATE.to_dict()
    del mapping[key]
    with pytest.raises(ValueError, match=rf"carries the key '{key}'.*scale.*gradscale.import_state"):
        ScaleState.from_dict(mapping)


@pytest.mark.parametrize("schema", [np.ones(2), np.ones(()), True])
def test_a_schema_of_another_type_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"ScaleState reads schema 1. Received: .*version of gradscale"):
        ScaleState.from_dict(edited(STATE, schema=schema))


@pytest.mark.parametrize("schema", [0, 2, "1", None])
def test_another_schema_version_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=rf"ScaleState reads schema 1. Received: {schema!r}.*version of gradscale"):
        ScaleState.from_dict(edited(STATE, schema=schema))


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Static reads kind 'Static'\. Received: 'Dynamic'"):
        Static.from_dict(DYNAMIC.to_dict())


def test_a_missing_key_is_refused_by_name() -> None:
    mapping = STATE.to_dict()
    del mapping["scale"], mapping["applied"]
    with pytest.raises(ValueError, match=r"needs every key. Missing: \['applied', 'scale'\]"):
        ScaleState.from_dict(mapping)


def test_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no such key: \['scael'\]. Expected: \['applied', 'clean_steps'"):
        ScaleState.from_dict(edited(STATE, scael=1.0))


def test_an_unknown_key_that_is_no_string_is_refused_too() -> None:
    with pytest.raises(ValueError, match=r"no such key: \['7'\]"):
        ScaleState.from_dict({**STATE.to_dict(), 7: 1.0})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("record", "key", "value", "text"),
    [
        (STATE, "scale", "1024", "`ScaleState.scale` must be a number. Received: '1024'"),
        (STATE, "scale", None, "`ScaleState.scale` must be a number. Received: None"),
        (STATE, "scale", True, "`ScaleState.scale` must be a number. Received: True"),
        (STATE, "scale", [1.0, "x"], "`ScaleState.scale` must be a number. Received: 'x'"),
        (STATE, "scale", [[1.0]], r"`ScaleState.scale` must be a number. Received: \[1.0\]"),
        (STATE, "applied", 1.0, "`ScaleState.applied` must be an integer. Received: 1.0"),
        (STATE, "applied", True, "`ScaleState.applied` must be an integer. Received: True"),
        (STATE, "applied", "inf", "`ScaleState.applied` must be an integer. Received: 'inf'"),
        (STATE, "stuck", 1, "`ScaleState.stuck` must be a bool. Received: 1"),
        (SAMPLE, "number", "2.5", "`Sample.number` must be a number. Received: '2.5'"),
        (SAMPLE, "number", False, "`Sample.number` must be a number. Received: False"),
        (SAMPLE, "number", None, "`Sample.number` must be a number. Received: None"),
        (SAMPLE, "number", np.ones(2), "`Sample.number` must be a number. Received: array"),
        (SAMPLE, "maybe", "x", "`Sample.maybe` must be a number. Received: 'x'"),
        (SAMPLE, "count", 2.0, "`Sample.count` must be an integer. Received: 2.0"),
        (SAMPLE, "count", [1, 2], r"`Sample.count` must be an integer. Received: \[1, 2\]"),
        (SAMPLE, "flag", 0, "`Sample.flag` must be a bool. Received: 0"),
        (SAMPLE, "choice", 1, "`Sample.choice` must be a string. Received: 1"),
        (SAMPLE, "text", 1, "`Sample.text` must be a string. Received: 1"),
        (SAMPLE, "format", 16, "`Sample.format` must be a string. Received: 16"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(record: Record, key: str, value: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        type(record).from_dict(edited(record, **{key: value}))


@pytest.mark.parametrize(
    ("record", "key", "value", "text"),
    [
        (STATE, "scale", math.nan, "`ScaleState.scale` must not be NaN.*damaged"),
        (STATE, "scale", [1.0, math.nan], "`ScaleState.scale` must not be NaN"),
        (SAMPLE, "number", math.nan, "`Sample.number` must not be NaN"),
        (STATE, "scale", -1.0, "`ScaleState.scale` must not be negative. Received: -1.0"),
        (STATE, "applied", -1, "`ScaleState.applied` must not be negative. Received: -1"),
        (STATE, "skipped", -1, "`ScaleState.skipped` must not be negative. Received: -1"),
        (STATE, "consecutive_skips", -1, "`ScaleState.consecutive_skips` must not be negative"),
        (STATE, "clean_steps", -1, "`ScaleState.clean_steps` must not be negative"),
        (STATE, "credits", [1, -1], r"`ScaleState.credits` must not be negative. Received: \[1, -1\]"),
        (STATE, "applied", 2**31, r"`ScaleState.applied` must fit int32. Received: \[2147483648\]"),
        (STATE, "scale", 10**400, "`ScaleState.scale` must fit float64. Received an integer of 1329 bits"),
        (SAMPLE, "count", 2**63, "`Sample.count` must fit int64"),
        (SAMPLE, "choice", "c", r"`Sample.choice` must be one of \['a', 'b'\]. Received: 'c'"),
        (SAMPLE, "format", "float77", r"Received: 'float77'. Did you mean 'float'\? Known names"),
        (DYNAMIC, "refill", "never", r"`Dynamic.refill` must be one of \['growth', 'clean'\]. Received: 'never'"),
        (DYNAMIC, "growth_factor", 1.0, "`growth_factor` must be greater than 1"),
    ],
)
def test_a_value_out_of_range_is_refused(record: Record, key: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        type(record).from_dict(edited(record, **{key: value}))


def test_reading_leaves_the_mapping_as_it_was() -> None:
    mapping = STATE.to_dict()
    before = dict(mapping)
    ScaleState.from_dict(mapping)
    assert mapping == before


def test_numbers_are_the_settings_that_are_neither_text_nor_formats_nor_bools() -> None:
    assert numbers(SAMPLE) == {"number": 2.5, "count": 7, "maybe": 0.5}
    assert numbers(Sample()) == {"number": 1.0, "count": 1}
    assert numbers(STATE)["stuck"] == np.bool_(True)


def test_a_bool_of_a_state_is_a_number_even_as_a_python_bool() -> None:
    assert numbers(dataclasses.replace(STATE, stuck=False))["stuck"] is False


@pytest.mark.parametrize(
    ("hint", "kind"),
    [
        (float, float),
        (int, int),
        (bool, bool),
        (str, None),
        (Format, None),
        (Literal["a"], None),
        (float | None, float),
        (int | None, int),
        (int | float, float),
    ],
)
def test_the_type_of_number_a_setting_holds_is_read_from_its_annotation(hint: Any, kind: type | None) -> None:
    assert number_type(hint) is kind


def test_placing_makes_arrays_of_the_numbers_and_keeps_the_rest() -> None:
    placed = place(SAMPLE, lambda array: array)
    assert (placed.number, placed.number.dtype) == (2.5, np.float32)  # pyright: ignore[reportAttributeAccessIssue]
    assert (placed.count, placed.count.dtype) == (7, np.int32)  # pyright: ignore[reportAttributeAccessIssue]
    assert (placed.flag, placed.choice, placed.text, placed.format) == (True, "b", "u", BF16)
    assert SAMPLE.number == 2.5
    assert type(SAMPLE.number) is float


def test_placing_a_state_puts_every_leaf() -> None:
    put: list[Any] = []
    placed = place(STATE, lambda array: put.append(array.dtype) or array)
    assert put == [np.float32, np.int32, np.int32, np.int32, np.int32, np.int32, np.bool_]
    assert placed == STATE


def test_values_are_set_on_a_copy_and_past_the_checks() -> None:
    copied = with_values(DYNAMIC, {"growth_factor": np.array([0.5, 2.0])})
    assert copied.growth_factor.tolist() == [0.5, 2.0]  # pyright: ignore[reportAttributeAccessIssue]
    assert DYNAMIC.growth_factor == 3.0


def test_a_leaf_without_a_default_is_required() -> None:
    @dataclass(frozen=True)
    class Two(Record):
        first: Any = leaf("float32")
        second: Any = leaf("bool", True)

    assert Two(first=1).second is np.True_
    with pytest.raises(TypeError, match="first"):
        Two()  # pyright: ignore[reportCallIssue]
