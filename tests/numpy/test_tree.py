"""Structures of gradients: their names, and the same structure with other arrays."""

from collections import OrderedDict
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from gradscale.numpy.apply import apply
from gradscale.numpy.tree import mapped, named_arrays


class Layer(NamedTuple):
    weight: Any
    bias: Any


ONE = np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        (ONE, ["grads"]),
        ([ONE, ONE], ["0", "1"]),
        ((ONE, [ONE, ONE]), ["0", "1.0", "1.1"]),
        ({"encoder": [{"weight": ONE, "bias": ONE}], "head": ONE}, ["encoder.0.weight", "encoder.0.bias", "head"]),
        ({"layer": Layer(ONE, None), 3: ONE}, ["layer.weight", "3"]),
        (np.float32(1.0), ["grads"]),
        ([None, ONE], ["1"]),
    ],
)
def test_arrays_are_named_by_their_path(tree: Any, names: list[str]) -> None:
    assert [name for name, _ in named_arrays(tree)] == names


@pytest.mark.parametrize(
    "tree",
    [[1, (2, 3)], {"a": {"b": 1}, "c": None}, Layer(1, [2]), ([], {}, ())],
)
def test_the_structure_stays_when_leaves_are_replaced(tree: Any) -> None:
    same = mapped(tree, lambda _, leaf: leaf)
    assert same == tree
    assert type(same) is type(tree)


def test_any_mapping_becomes_a_dict() -> None:
    assert type(mapped(OrderedDict(a=1), lambda _, leaf: leaf)) is dict


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        (np.float16, np.float32),
        (ml_dtypes.bfloat16, np.float32),
        (ml_dtypes.float8_e5m2, np.float32),
        (np.float32, np.float32),
        (np.float64, np.float64),
        (np.complex64, np.complex64),
        (np.complex128, np.complex128),
    ],
)
def test_gradients_come_back_in_float32_or_wider(given: Any, returned: Any) -> None:
    applied = apply({"w": np.array([[2.0], [-4.0]]).astype(given)}, 0.25)["w"]
    assert applied.dtype == returned
    assert applied.tolist() == [[0.5], [-1.0]]


def test_float16_gradients_are_unscaled_beyond_the_range_of_float16() -> None:
    smallest = np.array([2.0**-24], np.float16)
    assert apply([smallest], 2.0**-16)[0].tolist() == [2.0**-40]


def test_a_product_is_rounded_once() -> None:
    array = np.array([1 / 3, 1e-40, 3e38], np.float32)
    factor = 0.1
    assert apply(array, factor).tolist() == (array.astype(np.float64) * factor).astype(np.float32).tolist()


def test_missing_gradients_stay_missing() -> None:
    applied = apply([None, ONE], 2.0)
    assert applied[0] is None
    assert applied[1].tolist() == [2.0]


def test_a_strided_array_comes_back_in_its_shape() -> None:
    array = np.arange(12, dtype=np.float16).reshape(3, 4)[::-1, ::2].T
    np.testing.assert_array_equal(apply(array, 0.5), array.astype(np.float32) / 2)


def test_a_scalar_comes_back_as_a_scalar_array() -> None:
    assert apply({"bias": np.float32(4.0)}, 0.5)["bias"].shape == ()
