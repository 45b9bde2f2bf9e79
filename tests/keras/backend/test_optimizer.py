"""`LossScaleOptimizer` is built: what it takes, what it refuses, and what it writes into a config."""

import json
from inspect import signature
from typing import Any

import keras
import pytest
from tests.keras.backend.helpers import network, numbers, tensors, variables
from tests.other_names import check_answers

from gradscale import Dynamic, Headroom, NoScaling, Policy, ScaleState, Static, preset
from gradscale._text import did_you_mean
from gradscale.keras import LossScaleOptimizer
from gradscale.keras.compat import INNER_DEFAULTS
from gradscale.keras.measure import BACKEND

SGD = keras.optimizers.SGD
KerasOwn = keras.optimizers.LossScaleOptimizer

ODD = Dynamic(
    init_scale=96.0,
    growth_factor=3.0,
    backoff_factor=0.25,
    growth_interval=7,
    hysteresis=3,
    refill="clean",
    min_scale=2.0,
    max_scale=4096.0,
)


def test_it_is_a_loss_scale_optimizer_of_keras() -> None:
    assert isinstance(LossScaleOptimizer(SGD()), keras.optimizers.LossScaleOptimizer)


def test_the_arguments_of_keras_give_the_rule_of_keras_between_the_bounds_of_float32() -> None:
    optimizer = LossScaleOptimizer(SGD(), 1024.0, 50)
    assert optimizer.policy == Dynamic(init_scale=1024.0, growth_interval=50, min_scale=2.0**-126, max_scale=2.0**126)
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (1024.0, 50)


def test_auto_is_headroom() -> None:
    assert LossScaleOptimizer(SGD(), policy="auto").policy == Headroom()


@pytest.mark.parametrize("arguments", [{"initial_scale": 8.0}, {"dynamic_growth_steps": 5}])
def test_a_policy_beside_the_arguments_of_keras_is_refused(arguments: Any) -> None:
    with pytest.raises(
        ValueError, match=r"`policy` replaces `initial_scale` and `dynamic_growth_steps`\. Received all"
    ):
        LossScaleOptimizer(SGD(), policy=Dynamic(), **arguments)


@pytest.mark.parametrize("policy", [Dynamic, 1024.0])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(TypeError, match=r"`policy` must be .*a policy, such as `Dynamic\(\)`, .*Received: policy="):
        LossScaleOptimizer(SGD(), policy=policy)


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan"), -1.0])
def test_a_scale_that_cannot_be_one_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"`initial_scale` must lie between 2\*\*-126 and 2\*\*126"):
        LossScaleOptimizer(SGD(), scale)


def test_growth_steps_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`dynamic_growth_steps` must be between 1 and .* dynamic_growth_steps=0"):
        LossScaleOptimizer(SGD(), dynamic_growth_steps=0)


def test_the_fixed_scale_of_tf_keras_is_refused_in_favour_of_a_policy() -> None:
    with pytest.raises(ValueError, match=r"Pass `policy=Static\(1024\.0\)`.* set `loss_scale_factor` directly on"):
        LossScaleOptimizer(SGD(), initial_scale=1024.0, dynamic=False)
    with pytest.raises(ValueError, match=r"Pass `policy=Static\(128\.0\)`"):
        LossScaleOptimizer(SGD(), initial_scale=128.0, dynamic=False)
    for dynamic in (True, False):
        with pytest.raises(TypeError, match=rf"that of tf-keras, `dynamic`, is gone\. Received: {dynamic}\. Leave it"):
            LossScaleOptimizer(SGD(), dynamic)


def test_misspelt_arguments_are_answered_and_those_of_old_files_are_not_taken_for_them() -> None:
    with pytest.raises(TypeError, match=r"has no argument 'inital_scale'\. .* Did you mean 'initial_scale'\?$"):
        LossScaleOptimizer(SGD(), inital_scale=8.0)
    optimizer = LossScaleOptimizer(SGD())
    with pytest.raises(TypeError, match=r"^`apply_if_finite` has no argument 'los'\. .* Did you mean 'loss'\?$"):
        optimizer.apply_if_finite([], [], los=1.0)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
    mistaken = {name for name in INNER_DEFAULTS if did_you_mean(name, signature(LossScaleOptimizer).parameters)}
    assert mistaken <= {"name", "args", "kwargs"}


def test_what_is_excluded_from_decay_is_excluded_in_the_inner_optimizer() -> None:
    models = variables([2.0], [3.0])
    optimizer = LossScaleOptimizer(keras.optimizers.AdamW(0.5, weight_decay=0.5))
    optimizer.exclude_from_weight_decay(var_names=["w0"])
    optimizer.apply_if_finite(tensors([0.0], [0.0]), models)
    assert numbers(*(model.value for model in models)) == [[2.0], [2.25]]


def test_without_a_policy_the_config_is_that_of_keras_own_class() -> None:
    inner = SGD()
    mine, own = (kind(inner, 3.0, 2, name="mine").get_config() for kind in (LossScaleOptimizer, KerasOwn))
    assert mine == own
    assert {key: mine[key] for key in ("name", "initial_scale", "dynamic_growth_steps")} == {
        "name": "mine",
        "initial_scale": 3.0,
        "dynamic_growth_steps": 2,
    }


@pytest.mark.parametrize("policy", [ODD, Static(3.0), NoScaling(), Headroom(margin_bits=3.0), preset("keras")])
def test_a_config_goes_through_json_and_gives_the_same_optimizer(policy: Policy) -> None:
    optimizer = LossScaleOptimizer(SGD(0.125, momentum=0.5), name="mine", policy=policy)
    written = json.loads(json.dumps(keras.saving.serialize_keras_object(optimizer)))
    read = keras.saving.deserialize_keras_object(written)
    assert type(read) is LossScaleOptimizer
    assert (read.policy, read.name) == (policy, "mine")
    assert read.inner_optimizer.get_config() == optimizer.inner_optimizer.get_config()


def test_reading_a_config_leaves_it_as_it_was() -> None:
    config = LossScaleOptimizer(SGD(), policy=ODD).get_config()
    keys = set(config)
    assert LossScaleOptimizer.from_config(config).policy == LossScaleOptimizer.from_config(config).policy == ODD
    assert set(config) == keys


def test_the_variables_are_those_of_keras_then_the_rest_then_the_inner_ones() -> None:
    optimizer = LossScaleOptimizer(SGD(momentum=0.5), policy="auto")
    optimizer.build(variables([1.0]))
    own = ["iteration", "learning_rate", "step_counter", "dynamic_scale", "scale_counters", "scale_memory"]
    assert [variable.name for variable in optimizer.variables][:6] == own
    assert len(optimizer.variables) == 6 + len(optimizer.inner_optimizer.variables)


def test_a_policy_without_further_numbers_has_one_variable_more_than_keras() -> None:
    theirs = keras.optimizers.LossScaleOptimizer(SGD())
    ours = LossScaleOptimizer(SGD())
    for optimizer in (theirs, ours):
        optimizer.build(variables([1.0]))
    assert len(ours.variables) == len(theirs.variables) + 1


def test_under_mixed_float16_it_is_not_wrapped_a_second_time() -> None:
    model, optimizer = network(dtype="mixed_float16"), LossScaleOptimizer(SGD())
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    model.compile(optimizer, loss="mse", auto_scale_loss=True)
    assert model.optimizer is optimizer
    model.compile(SGD(), loss="mse", auto_scale_loss=True)
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer  # the check above can fail


def test_the_state_before_the_first_step_is_the_start_of_the_policy_built_or_not() -> None:
    optimizer = LossScaleOptimizer(SGD(), policy=preset("flax"))
    before = optimizer.state
    optimizer.build(variables([1.0]))
    assert before == optimizer.state == preset("flax").start()


@pytest.mark.parametrize("built", [False, True])
def test_training_continues_from_a_loaded_state(built: bool) -> None:
    optimizer = LossScaleOptimizer(SGD())
    state = ScaleState.from_dict(
        ScaleState(scale=64.0).to_dict() | {"clean_steps": 7, "credits": 2, "applied": 9, "skipped": 3, "stuck": True}
    )
    models = variables([1.0])
    if built:
        optimizer.build(models)
    optimizer.load_state(state)
    assert numbers(optimizer.scale_loss(2.0)) == [128.0]
    optimizer.build(models) if not built else None
    assert optimizer.state == state
    assert numbers(optimizer.scale_loss(2.0)) == [128.0]


def test_the_state_of_another_policy_is_refused() -> None:
    with pytest.raises(TypeError, match="`state` must be a HeadroomState"):
        LossScaleOptimizer(SGD(), policy="auto").load_state(Dynamic().start())


@pytest.mark.parametrize(
    ("inner", "error", "text"),
    [
        ("adam", TypeError, r"must be a Keras optimizer\. Received: 'adam' \(str\)\. Pass an instance"),
        (SGD, TypeError, r"must be a Keras optimizer\. Received: .*Pass an instance"),
        (
            LossScaleOptimizer(SGD()),
            ValueError,
            r"divide the gradients again\. Received: a LossScaleOptimizer\. Pass the optimizer",
        ),
    ],
    ids=["name", "class", "scaler"],
)
def test_an_inner_optimizer_that_cannot_be_one_is_refused(inner: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LossScaleOptimizer(inner)


def test_a_policy_can_be_named_as_on_the_command_line() -> None:
    assert LossScaleOptimizer(SGD(), policy="static:1024").policy == Static(1024)
    with pytest.raises(ValueError, match=r"Received: policy='dynamc': .* Did you mean 'dynamic'\?"):
        LossScaleOptimizer(SGD(), policy="dynamc")


def test_names_of_other_scalers_are_answered_with_what_to_use() -> None:
    optimizer = LossScaleOptimizer(SGD())
    optimizer.build(variables(1.0))
    check_answers(optimizer, "keras")


def test_settings_of_other_scalers_are_answered_with_a_policy() -> None:
    call = r"Use `LossScaleOptimizer\(inner_optimizer, policy=Dynamic\(init_scale=8\.0\)\)`"
    with pytest.raises(TypeError, match=call):
        LossScaleOptimizer(SGD(), init_scale=8.0)


def test_optimizer_and_result_are_shown_with_scale_status_and_counts() -> None:
    optimizer = LossScaleOptimizer(SGD(), policy=Dynamic(init_scale=8.0))
    assert repr(optimizer) == "LossScaleOptimizer(SGD, Dynamic(init_scale=8.0), scale=8.0, applied=0, skipped=0)"
    result = optimizer.apply_if_finite(tensors(float("inf")), variables(1.0))
    numbers(optimizer.state.scale, result.applied)  # read first: on JAX they may not be computed yet
    assert repr(optimizer) == "LossScaleOptimizer(SGD, Dynamic(init_scale=8.0), scale=4.0, applied=0, skipped=1)"
    assert repr(result) == "StepResult(status=overflow, scale=8.0, next_scale=4.0)"
    with pytest.raises(TypeError, match="A StepResult is neither true nor false"):
        bool(result)
    for method in (result.skipped, result.status, result.culprits):
        with pytest.raises(TypeError, match="is a method, which has no truth value"):
            bool(method)


def test_what_is_on_a_device_is_not_read_to_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = LossScaleOptimizer(SGD(), policy="dynamic")
    result = optimizer.apply_if_finite(tensors(1.0), variables(1.0))
    monkeypatch.setattr(BACKEND, "place", lambda _: "<on cuda:0>")
    place = "scale=<on cuda:0>, applied=<on cuda:0>, skipped=<on cuda:0>"
    assert repr(optimizer) == f"LossScaleOptimizer(SGD, Dynamic(), {place})"
    assert repr(result) == "StepResult(status=<on cuda:0>, scale=<on cuda:0>, next_scale=<on cuda:0>)"
