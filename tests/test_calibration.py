"""The calibration of gradients by their histograms."""

import json

import numpy as np
import pytest

from gradscale import FP8_E4M3
from gradscale.histogram import ExponentHistogram, best_static_scale, calibration_of, exponent_histogram, losses


def histogram_of(*exponents: int, each: int = 100) -> ExponentHistogram:
    return exponent_histogram(np.concatenate([np.full(each, 1.5 * 2.0**exponent) for exponent in exponents]))


def test_the_scale_is_the_best_static_one_of_all_gradients_together() -> None:
    parts = {"a": histogram_of(-3, -20), "b": histogram_of(2, -10)}
    found = calibration_of(parts, margin_bits=3)
    total = parts["a"] + parts["b"]
    assert found.scale == best_static_scale(total, margin_bits=3)
    assert found.safe_bits == 3
    assert found.losses == losses(total, "FP16", found.scale)
    assert [each.scale / found.scale for each in found.at] == [2.0**bits for bits in range(-12, 13)]


def test_eight_scales_are_shown_and_the_first_is_none() -> None:
    for exponent in (-30, -3, 8, 40):
        found = calibration_of({"a": histogram_of(exponent, exponent - 10)})
        shown = [each.scale for each in found.shown]
        assert (len(shown), len(set(shown)), shown[0]) == (8, 8, 1.0)
        assert found.scale in shown
        assert shown in (sorted(shown), sorted(shown, reverse=True))


def test_whether_a_scale_is_needed_is_answered_first() -> None:
    needed = calibration_of({"a": histogram_of(-3), "b": histogram_of(-40)})
    assert needed.needs_scale
    assert str(needed).startswith(
        "A scale is needed: without a scale 50.00% of the gradients become zero in FP16, and more than 1% of 1 of the "
        "2 measured tensors. At 2^15, 0.00% do."
    )
    without = calibration_of({"a": histogram_of(-3, -10)})
    assert not without.needs_scale
    assert without.answer.startswith("No scale is needed for these batches: without a scale 0.00% of the gradients")
    large = calibration_of({"a": histogram_of(20)})
    assert large.needs_scale
    assert large.answer == "A scale is needed: without one 100.00% of the gradients overflow FP16. Use 2^-8."


def test_a_layer_that_is_served_has_no_advice() -> None:
    found = calibration_of({"a": histogram_of(-3, -20)})
    assert found.unserved == []
    assert found.layers[0].range_bits == 18


def test_a_layer_of_small_gradients_is_advised_to_be_rescaled() -> None:
    found = calibration_of({"large": histogram_of(10), "small": histogram_of(-30, -32)})
    (layer,) = found.unserved
    assert layer.name == "small"
    assert layer.losses.flushed == 1.0
    assert layer.own_losses.flushed == 0.0
    # The largest gradients are at 2^10 and 2^-30: alone, the second could be scaled by 2^40 more.
    assert layer.advice == "keep it in float32, or multiply its gradient by up to 2^40 more"


def test_a_layer_with_too_wide_a_range_is_advised_to_stay_in_float32() -> None:
    found = calibration_of({"wide": histogram_of(0, -20, -60)})
    assert found.unserved[0].advice == "keep it in float32: no scale fits its range"


def test_layers_that_lose_most_come_first_and_one_without_gradients_is_served() -> None:
    zero = exponent_histogram(np.zeros(3))
    found = calibration_of({"zero": zero, "large": histogram_of(0), "small": histogram_of(-45, -46)}, FP8_E4M3)
    assert [layer.name for layer in found.layers] == ["small", "zero", "large"]
    assert found.layers[1].own_scale is None


def test_the_text_has_every_scale_and_every_layer() -> None:
    text = str(calibration_of({"encoder.weight": histogram_of(-3, -20)}))
    assert "FP16: scale 32768, 2 bits below overflow" in text
    assert "2^15 (best)" in text
    assert "encoder.weight" in text


def test_a_format_with_the_range_of_float32_needs_no_scale() -> None:
    found = calibration_of({"a": histogram_of(-3, -40)}, "bf16")
    assert found.scale == found.layers[0].own_scale == 1.0
    assert found.losses.flushed == 0.0
    assert "BF16 has the range of float32: it needs no loss scaling." in str(found)
    assert not found.needs_scale


def test_gradients_too_large_for_bf16_have_a_scale_below_one() -> None:
    assert calibration_of({"a": histogram_of(127)}, "bf16").scale == 2.0**-3


def test_the_dict_is_plain() -> None:
    as_dict = calibration_of({"a": histogram_of(-3, -20)}).to_dict()
    assert json.loads(json.dumps(as_dict))["format"] == "FP16"


def test_gradients_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="must be finite"):
        calibration_of({"a": exponent_histogram(np.array([np.inf, 1.0]))})
