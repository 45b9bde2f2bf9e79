"""What the `explain` of every framework has in common."""

import pytest

from gradscale.explain import (
    NEEDED,
    NOT_NEEDED,
    NOT_NEEDED_BF16,
    LayerRow,
    explanation_text,
    layer_table,
    merged_rows,
    scaler_warning,
    scaling_advice,
)


def row(name: str, elements: int = 1, compute_dtype: str = "float16") -> LayerRow:
    return LayerRow(name, 1, "Dense", "float32", compute_dtype, elements)


@pytest.mark.parametrize(
    ("dtypes", "advice"),
    [
        ({"float32"}, NOT_NEEDED),
        ({"float32", "bfloat16"}, NOT_NEEDED_BF16),
        ({"bfloat16", "float16"}, NEEDED),
        (set(), NOT_NEEDED),
    ],
)
def test_fp16_anywhere_needs_a_scaler(dtypes: set[str], advice: str) -> None:
    assert scaling_advice(dtypes) == advice


@pytest.mark.parametrize(
    ("scaling", "scales", "start", "end"),
    [
        (NEEDED, False, "FP16 runs with no scaler", "Add one."),
        (NOT_NEEDED, True, "A scaler runs for nothing", "Remove it."),
        (NOT_NEEDED_BF16, True, "A scaler runs for nothing", "Remove it."),
    ],
)
def test_a_scaler_that_is_missing_or_useless_is_warned_of(scaling: str, scales: bool, start: str, end: str) -> None:
    warning = scaler_warning(scaling, scales=scales, add="Add one.", remove="Remove it.")
    assert warning is not None
    assert warning.startswith(start)
    assert warning.endswith(end)


@pytest.mark.parametrize(("scaling", "scales"), [(NEEDED, True), (NOT_NEEDED, False), (NOT_NEEDED_BF16, False)])
def test_what_is_as_it_should_be_is_not_warned_of(scaling: str, scales: bool) -> None:
    assert scaler_warning(scaling, scales=scales, add="Add one.", remove="Remove it.") is None


def test_rows_of_one_pattern_and_the_same_dtypes_are_merged() -> None:
    rows = [row("a_1", 2), row("a_2", 3), row("a_3", 4, "float32"), row("b", 5)]
    merged = merged_rows([(each.name[0], each) for each in rows], "+".join)
    assert merged == (
        LayerRow("a_1+a_2", 2, "Dense", "float32", "float16", 5),
        LayerRow("a_3", 1, "Dense", "float32", "float32", 4),
        LayerRow("b", 1, "Dense", "float32", "float16", 5),
    )


def test_the_table_has_a_column_for_buffers_where_there_are_any() -> None:
    without, having = (layer_table("layer", [row("")], buffers=buffers) for buffers in (False, True))
    assert without.splitlines()[0].split() == ["layer", "class", "weights", "computes", "in", "elements"]
    assert having.splitlines()[0].split() == ["layer", "class", "weights", "buffers", "computes", "in", "elements"]
    assert "(the model itself)" in without


def test_the_text_ends_with_the_advice_and_the_warnings() -> None:
    assert explanation_text(["table"], NOT_NEEDED, ["one", "two"]).splitlines() == [
        "table",
        f"Scaler: {NOT_NEEDED}",
        "Warning: one",
        "Warning: two",
    ]
