"""Custom loops: results, scaled losses and unscaled gradients, with all that may arrive as a gradient."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.backend.helpers import (
    BACKEND,
    INF,
    NAN,
    compiled,
    host,
    inner_state,
    numbers,
    same,
    tensors,
    variables,
)

from gradscale import Dynamic, Headroom, NoScaling, Policy, Static, Status
from gradscale.engine import result as engine
from gradscale.engine.culprits import Culprit
from gradscale.engine.metrics import METRICS
from gradscale.keras import LossScaleOptimizer, Recorder, compat
from gradscale.keras.measure import BACKEND as BACKEND_KERNELS
from gradscale.recording.form import read_line

SGD = keras.optimizers.SGD


def built(models: list[Any], inner: Any = None, **settings: Any) -> LossScaleOptimizer:
    optimizer = LossScaleOptimizer(inner or SGD(0.5), **(settings or {"policy": Dynamic(init_scale=8.0)}))
    optimizer.build(models)
    return optimizer


@pytest.fixture
def models() -> list[Any]:
    return variables([1.0, 2.0], [4.0])


@pytest.mark.parametrize("compile_it", [False, True])
def test_a_clean_step_is_applied_and_reported(models: list[Any], compile_it: bool) -> None:
    optimizer = built(models)
    step = compiled(optimizer, models, norm=True) if compile_it else None
    grads = tensors([24.0, 0.0], [-32.0])
    result = step(*grads) if step else optimizer.apply_if_finite(grads, models, norm=True)
    assert (result.status(), result.skipped(), result.culprits()) == (Status.APPLIED, False, [])
    assert numbers(result.applied, result.scale, result.next_scale, result.loss_finite) == [True, 8.0, 8.0, True]
    assert numbers(result.amax, result.grad_norm) == [4.0, 5.0]
    assert [host(model).tolist() for model in models] == [[-0.5, 2.0], [6.0]]


@pytest.mark.parametrize("compile_it", [False, True])
def test_a_step_that_overflows_is_skipped_and_its_culprits_are_named(models: list[Any], compile_it: bool) -> None:
    optimizer = built(models, SGD(0.5, momentum=0.5))
    before = inner_state(optimizer)
    grads = tensors([INF, NAN], [-INF])
    result = compiled(optimizer, models)(*grads) if compile_it else optimizer.apply_if_finite(grads, models)
    assert (result.status(), result.skipped()) == (Status.OVERFLOW, True)
    assert result.culprits() == [Culprit("w0", "nan"), Culprit("w1", "inf")]
    assert numbers(result.scale, result.next_scale) == [8.0, 4.0]
    assert [host(model).tolist() for model in models] == [[1.0, 2.0], [4.0]]
    assert same(before, inner_state(optimizer))


@pytest.mark.parametrize("compile_it", [False, True])
def test_after_an_overflow_norm_and_largest_magnitude_are_infinite(models: list[Any], compile_it: bool) -> None:
    optimizer, grads = built(models), tensors([8.0, NAN], [8.0])
    step = compiled(optimizer, models, norm=True)
    result = step(*grads) if compile_it else optimizer.apply_if_finite(grads, models, norm=True)
    assert isinstance(result, engine.StepResult)
    assert numbers(result.amax, result.grad_norm) == [INF, INF]
    assert (result.retries, result.attempted, result.counts, result.names) == (0, True, (), ("w0", "w1"))


def test_metrics_have_the_names_of_all_frameworks(models: list[Any]) -> None:
    optimizer = built(models)
    result = optimizer.apply_if_finite(tensors([24.0, 0.0], [-32.0]), models, norm=True)
    optimizer.apply(tensors([INF, 0.0], [0.0]), models)
    known = optimizer.metrics(result)
    assert tuple(known) == tuple(optimizer.metrics()) == METRICS
    bits = np.log2(65504 / 16)  # the largest gradient, 4, times the scale, which is 4 by now
    assert list(known.values()) == [4.0, 1, 1, 0.5, 5.0, pytest.approx(bits)]
    assert np.isnan([optimizer.metrics()[name] for name in ("grad_norm", "headroom_bits")]).all()


@pytest.mark.parametrize("size", [3, 1000, 5000])
def test_one_nan_anywhere_is_found(size: int) -> None:
    model = variables(np.ones(size))
    step = compiled(built(model), model)
    for place in (0, 1, size // 2, size - 1):
        grad = np.ones(size, "float32")
        grad[place] = NAN  # XLA's maximum loses some of them
        assert step(*tensors(grad)).status() is Status.OVERFLOW, place


@pytest.mark.parametrize("loss", [INF, NAN])
def test_a_loss_that_is_not_finite_skips_the_step_and_leaves_the_scale(models: list[Any], loss: float) -> None:
    optimizer = built(models)
    result = optimizer.apply_if_finite(tensors([1.0, 1.0], [NAN]), models, loss=tensors(loss)[0])
    assert result.status() is Status.NONFINITE_LOSS
    assert numbers(result.next_scale) == [8.0]
    assert host(models[0]).tolist() == [1.0, 2.0]


def test_without_any_gradient_nothing_happens(models: list[Any]) -> None:
    optimizer = built(models)
    before = optimizer.state
    result = optimizer.apply_if_finite([None, None], models)
    assert (result.status(), result.skipped(), result.culprits()) == (Status.NO_GRADS, True, [])
    assert optimizer.state == before


def test_a_variable_without_a_gradient_stays_and_keras_says_so(models: list[Any]) -> None:
    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        built(models).apply_if_finite(tensors([8.0, 8.0], None), models)
    assert [host(model).tolist() for model in models] == [[0.5, 1.5], [4.0]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_accumulate_in_the_type_of_their_variables(dtype: str) -> None:
    model = [keras.Variable(np.ones(2), dtype=dtype, name="w")]
    optimizer = built(model, SGD(0.5, gradient_accumulation_steps=2))
    for grad in ([8.0, 16.0], [INF, 8.0], [24.0, 16.0]):
        optimizer.apply([keras.ops.convert_to_tensor(grad, dtype)], model)
        optimizer.load_state(Dynamic(init_scale=8.0).start())
    assert numbers(keras.ops.cast(model[0].value, "float32")) == [[0.0, 0.0]]


def test_a_gradient_without_elements_is_no_obstacle() -> None:
    models = variables([1.0], np.zeros((0, 3)))
    result = built(models).apply_if_finite(tensors([8.0], np.zeros((0, 3))), models, norm=True)
    assert result.status() is Status.APPLIED
    assert numbers(result.amax, result.grad_norm) == [1.0, 1.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_gradients_are_divided_in_float32(dtype: str) -> None:
    models = variables([0.0])
    tiny = keras.ops.cast(tensors([2.0**-24])[0], dtype)
    built(models, policy=Static(2.0**16)).apply_if_finite([tiny], models)
    assert host(models[0]).tolist() == [-(2.0**-41)]


@pytest.mark.parametrize(("imaginary", "finite"), [(4.0, True), (INF, False)])
def test_complex_gradients_are_measured_in_both_parts(imaginary: float, finite: bool) -> None:
    grad = keras.ops.convert_to_tensor(np.array([complex(1.0, imaginary)], "complex64"))
    ((measured,),) = numbers(BACKEND_KERNELS.sizes([grad], peaks=True, kinds=False))
    assert measured == imaginary
    assert np.isfinite(measured) == finite


@pytest.mark.parametrize("policy", [Dynamic(init_scale=2.0**-4, min_scale=2.0**-8), Headroom(init_scale=2.0**-4)])
def test_gradients_that_overflow_only_once_they_are_divided_are_skipped(policy: Policy) -> None:
    models = variables([1.0])
    optimizer = built(models, policy=policy)
    optimizer.apply(tensors([1e38]), models)
    assert host(models[0]).tolist() == [1.0]
    assert optimizer.state.skipped == 1


@pytest.mark.parametrize("compile_it", [False, True])
@pytest.mark.parametrize(("grad", "finite"), [(16384.0, True), (32768.0, False)])
def test_gradients_that_weights_in_float16_cannot_take_are_skipped(grad: float, finite: bool, compile_it: bool) -> None:
    stored = [keras.Variable(np.ones(2, "float16"), dtype="float16", name="half")]
    optimizer = built(stored, SGD(2.0**-15), policy=Static(0.5))
    step = compiled(optimizer, stored) if compile_it else lambda *grads: optimizer.apply_if_finite(grads, stored)
    result = step(*tensors([grad, 0.0], dtype="float16"))
    assert result.skipped() is not finite
    assert host(stored[0]).tolist() == [0.0 if finite else 1.0, 1.0]
    assert result.culprits() == []


def test_float32_gradients_that_weights_in_float16_cannot_take_are_skipped_at_any_scale() -> None:
    stored = [keras.Variable(np.ones(2, "float16"), dtype="float16", name="half")]
    optimizer = built(stored, SGD(2.0**-15), policy=Static(8.0))
    optimizer.apply(tensors([2.0**20, 0.0]), stored)
    assert host(stored[0]).tolist() == [1.0, 1.0]
    assert optimizer.state.skipped == 1


def test_a_variable_that_is_overwritten_gets_its_gradient_as_it_is(models: list[Any]) -> None:
    models[1].overwrite_with_gradient = True
    optimizer = built(models, policy=Headroom(init_scale=8.0))
    result = optimizer.apply_if_finite(tensors([8.0, 8.0], [1e6]), models)
    assert [host(model).tolist() for model in models] == [[0.5, 1.5], [1e6]]
    assert numbers(result.amax) == [1.0]
    assert optimizer.apply_if_finite(tensors([8.0, 8.0], [INF]), models).status() is Status.OVERFLOW


@pytest.mark.skipif(not compat.STEPS_WITHOUT_GRADIENTS, reason="Keras before 3.10 cannot")
def test_all_variables_may_be_overwritten() -> None:
    models = variables([1.0])
    models[0].overwrite_with_gradient = True
    assert built(models).apply_if_finite(tensors([3.0]), models).status() is Status.APPLIED
    assert host(models[0]).tolist() == [3.0]


def test_gradients_that_only_unscaling_makes_infinite_are_an_overflow(models: list[Any]) -> None:
    optimizer = built(models, policy=Static(2.0**-100))
    assert optimizer.apply_if_finite(tensors([1e20, 0.0], [0.0]), models).status() is Status.OVERFLOW


def test_no_scaling_measures_nothing(models: list[Any]) -> None:
    result = built(models, policy=NoScaling()).apply_if_finite(tensors([INF, 0.0], [0.0]), models)
    assert (result.status(), result.amax, result.sizes) == (Status.APPLIED, None, None)
    assert numbers(result.next_scale) == [1.0]


def test_some_of_the_variables_may_be_updated_alone(models: list[Any]) -> None:
    optimizer = built(models)
    assert optimizer.apply_if_finite(tensors([8.0]), models[1:]).status() is Status.APPLIED
    assert [host(model).tolist() for model in models] == [[1.0, 2.0], [3.5]]


def test_the_first_step_builds_the_optimizer(models: list[Any]) -> None:
    optimizer = LossScaleOptimizer(SGD(0.5), policy=Static(8.0))
    optimizer.apply(tensors([8.0, 8.0], [8.0]), models)
    assert [host(model).tolist() for model in models] == [[0.5, 1.5], [3.5]]
    optimizer.apply(tensors([8.0, 8.0], [8.0]))
    assert host(models[1]).tolist() == [3.0]


@pytest.mark.parametrize("wrap", [tuple, list, iter])
def test_apply_gradients_takes_pairs(models: list[Any], wrap: Any) -> None:
    built(models).apply_gradients(wrap(list(zip(tensors([8.0, 8.0], [8.0]), models, strict=True))))
    assert host(models[1]).tolist() == [3.5]


def test_losses_are_scaled_in_float32_before_and_after_building(models: list[Any]) -> None:
    optimizer = LossScaleOptimizer(SGD(), 2.0**20)
    loss = tensors(0.5, dtype="float16")[0]
    for _ in range(2):
        assert numbers(optimizer.scale_loss(loss)) == [2.0**19]
        optimizer.build(models) if not optimizer.built else None


def test_the_scale_of_a_pure_function_comes_from_its_variables(models: list[Any]) -> None:
    optimizer = built(models)
    values = [variable.value for variable in optimizer.variables]
    values[3] = keras.ops.convert_to_tensor(64.0)
    assert numbers(optimizer.scale_loss(2.0, values)) == [128.0]


@pytest.mark.skipif(BACKEND != "jax", reason="compiled functions of the other backends read variables")
@pytest.mark.parametrize("call", ["scale_loss", "unscale_gradients", "apply", "apply_if_finite"])
def test_a_scale_that_jax_would_compile_in_is_refused(models: list[Any], call: str) -> None:
    import jax

    optimizer, grads = built(models), tensors([8.0, 8.0], [8.0])
    with pytest.raises(
        ValueError, match=r"the scale must be passed in with the optimizer's variables.*Received: a call"
    ):
        jax.jit(lambda value: getattr(optimizer, call)(value))(grads[1] if call == "scale_loss" else grads)
    assert optimizer.state == optimizer.policy.start()


def test_unscale_gradients_returns_unscaled_gradients(models: list[Any]) -> None:
    optimizer = built(models)
    first, missing = optimizer.unscale_gradients(tensors([8.0, 4.0], None))
    assert (numbers(first), missing) == ([[1.0, 0.5]], None)


def test_calls_that_come_too_early_are_refused() -> None:
    optimizer = LossScaleOptimizer(SGD())
    for call in (optimizer.unscale_gradients, optimizer.apply, optimizer.apply_if_finite):
        with pytest.raises(
            ValueError, match=r"needs an optimizer that knows its variables\. Received: one that is not"
        ):
            call(tensors([1.0]))


def test_too_few_gradients_are_refused(models: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"one gradient for each variable.* Received: 1 gradients for 2 variables"):
        built(models).apply_if_finite(tensors([1.0, 1.0]), models)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="has no pure functions")
def test_the_pure_step_changes_no_variable(models: list[Any]) -> None:
    optimizer = built(models)
    mine, theirs = [v.value for v in optimizer.variables], [keras.ops.copy(model.value) for model in models]
    theirs, mine, result = optimizer.stateless_apply_if_finite(mine, tensors([8.0, INF], [8.0]), theirs)
    assert result.status() is Status.OVERFLOW
    assert numbers(mine[3], *theirs) == [4.0, [1.0, 2.0], [4.0]]
    assert float(optimizer.state.scale) == 8.0


@pytest.mark.skipif(BACKEND == "tensorflow", reason="has no pure functions")
def test_the_pure_step_wants_a_value_for_every_variable(models: list[Any]) -> None:
    optimizer = built(models)
    values = [variable.value for variable in optimizer.variables]
    with pytest.raises(ValueError, match=r"`optimizer_variables` must hold one value for each variable\. Received: 2"):
        optimizer.stateless_apply_if_finite(values[:2], tensors([1.0, 1.0], [1.0]), [m.value for m in models])
    with pytest.raises(ValueError, match=r"`trainable_variables` must hold one value for each variable\. Received: 1"):
        optimizer.stateless_apply_if_finite(values, tensors([1.0, 1.0], [1.0]), [models[0].value])


@pytest.mark.skipif(BACKEND != "tensorflow", reason="has pure functions")
def test_tensorflow_has_no_pure_step(models: list[Any]) -> None:
    with pytest.raises(ValueError, match="a step is not a pure function there"):
        built(models).stateless_apply_if_finite([], [], [])


def test_an_error_of_the_inner_optimizer_leaves_everything_as_it_was(models: list[Any]) -> None:
    optimizer = built(models)
    before = optimizer.state
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply(tensors([1.0]), variables([1.0]))
    assert optimizer.state == before


@pytest.mark.parametrize("compile_it", [False, True])
def test_a_recorder_writes_the_results_of_a_loop(models: list[Any], compile_it: bool, tmp_path: Path) -> None:
    optimizer = built(models)
    step = compiled(optimizer, models, norm=True) if compile_it else None
    recorder = Recorder(tmp_path / "run.jsonl", optimizer)
    for size in (24.0, INF, 24.0):
        grads = tensors([size, 0.0], [-32.0])
        result = step(*grads) if step else optimizer.apply_if_finite(grads, models, norm=True)
        recorder.step(result, loss=0.5)
    recorder._recorder.close()
    lines: list[Any] = [read_line(line) for line in (tmp_path / "run.jsonl").read_bytes().splitlines()]
    header, *found = lines
    assert header.framework == "keras"
    assert [(each.step, each.scale, each.status, each.norm, each.note) for each in found] == [
        (0, 8.0, "applied", 5.0, {"loss": 0.5}),
        (1, 8.0, "overflow", INF, {"loss": 0.5}),
        (2, 4.0, "applied", 10.0, {"loss": 0.5}),
    ]
    assert [each.name for each in found[1].culprits] == ["w0"]
