"""`precision`: the dtype policy and the optimizer that goes with it."""

from collections.abc import Iterator
from typing import Any

import keras
import pytest
from tests.keras.backend.helpers import data, network

from gradscale import Dynamic, Headroom, NoScaling
from gradscale.engine import bf16
from gradscale.keras import LossScaleOptimizer, precision


@pytest.fixture(autouse=True)
def _policy_as_before() -> Iterator[None]:
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


def test_mixed_float16_is_set_and_its_optimizer_is_scaled() -> None:
    chosen = precision.set("mixed_float16")
    assert keras.config.dtype_policy().name == "mixed_float16"
    assert (chosen.compute_dtype, chosen.variable_dtype) == ("float16", "float32")
    optimizer = chosen.optimizer("sgd")
    assert isinstance(optimizer, LossScaleOptimizer)
    assert optimizer.policy == Headroom()
    assert isinstance(optimizer.inner_optimizer, keras.optimizers.SGD)


def test_the_rule_can_be_chosen() -> None:
    rule = Dynamic(init_scale=8.0)
    assert precision.set("mixed_float16", rule).optimizer("sgd").policy == rule


@pytest.mark.parametrize("name", ["mixed_bfloat16", "float32", "bfloat16"])
def test_what_has_the_range_of_float32_keeps_the_plain_optimizer(name: str) -> None:
    chosen = precision.set(name, Dynamic(init_scale=8.0))
    inner = keras.optimizers.SGD()
    assert chosen.policy == NoScaling()
    assert chosen.optimizer(inner) is inner


def test_weights_in_float16_need_scaling_too() -> None:
    assert precision.set("float16").needs_scaling


def test_the_present_policy_can_be_asked_for() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert precision.current().name == "mixed_bfloat16"
    assert precision.current() == precision.set("mixed_bfloat16")


@pytest.mark.parametrize("scaled", [LossScaleOptimizer, keras.optimizers.LossScaleOptimizer])
def test_an_optimizer_that_scales_already_is_refused(scaled: Any) -> None:
    chosen = precision.set("mixed_float16")
    with pytest.raises(ValueError, match=r"must be one that does not scale the loss, .* Received: a LossScaleOptim"):
        chosen.optimizer(scaled(keras.optimizers.SGD()))


def test_the_pair_trains_in_float16_and_is_not_wrapped_again() -> None:
    chosen = precision.set("mixed_float16")
    model = network()
    optimizer = chosen.optimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, loss="mse")
    before, after = (model.fit(*data(), verbose=0).history["loss"][0] for _ in range(2))
    assert model.optimizer is optimizer
    assert model.layers[0].compute_dtype == "float16"
    assert after < before


@pytest.mark.parametrize(
    ("name", "policy", "notes"),
    [
        ("mixed_bfloat16", "auto", 1),
        ("mixed_bfloat16", "none", 0),
        ("mixed_float16", "auto", 0),
        ("float32", "auto", 0),
    ],
)
def test_an_optimizer_built_under_bf16_is_noted_once_as_one_that_is_not_needed(
    name: str, policy: str, notes: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bf16, "_noted", [])
    keras.config.set_dtype_policy(name)
    for _ in range(2):
        LossScaleOptimizer(keras.optimizers.SGD(), policy=policy).build([keras.Variable(1.0)])
    assert len(caplog.messages) == notes
    assert all(f"built under Keras's dtype policy {name!r}" in each for each in caplog.messages)
