"""The INT8 example keeps its accuracy, in torch and in onnxruntime."""

import re

import pytest
from tests.examples.run import lines_printed

pytestmark = pytest.mark.slow  # as the example


@pytest.fixture
def printed() -> str:
    pytest.importorskip("onnxruntime")
    return "\n".join(lines_printed("torch_qat_int8"))


def test_int8_is_as_accurate_as_float32_to_two_points_in_a_hundred(printed: str) -> None:
    found = re.search(r"FP32 ([\d.]+)%, INT8 in torch ([\d.]+)%, INT8 in onnxruntime ([\d.]+)%", printed)
    assert found is not None
    in_float32, in_torch, in_onnx = map(float, found.groups())
    assert in_float32 > 95
    assert in_torch >= in_float32 - 2
    assert in_onnx >= in_float32 - 2
    assert abs(in_onnx - in_torch) < 0.5


def test_every_layer_has_its_input_and_its_weights_quantized(printed: str) -> None:
    assert "nodes: 6 quantize, 6 dequantize" in printed
