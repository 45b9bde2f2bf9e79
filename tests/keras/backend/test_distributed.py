"""Two devices that share a scale: an overflow on one of them alone is an overflow for both."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.backend.helpers import BACKEND, LARGE, NAN, network

from gradscale import Dynamic, Headroom, NoScaling, replay
from gradscale.keras import LossScaleOptimizer, ScaleMonitor, Watch

KerasOwn: Any = keras.optimizers.LossScaleOptimizer
SGD = keras.optimizers.SGD
POLICY = Dynamic(init_scale=2.0**80, growth_interval=2)
BATCHES, SIZE = 6, 8

pytestmark = pytest.mark.skipif(BACKEND == "torch", reason="Keras on torch leaves several devices to torch")


@cache
def mirrored() -> Any:
    """Returns the strategy of all tests: collectives of two strategies in one process get into each other's way."""
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@contextmanager
def two_devices() -> Iterator[None]:
    """Makes models inside the block train on two devices, as each backend does it."""
    if BACKEND == "tensorflow":
        with mirrored().scope():
            yield
    else:
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]))
        yield
        keras.distribution.set_distribution(None)


def data(*bad: int, device: int = 1, target: float = LARGE) -> tuple[Any, Any]:
    """Returns inputs and targets. In batches `bad`, the half of one device alone makes gradients overflow."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(BATCHES * SIZE, 4)).astype(np.float32)
    targets = rng.normal(size=(BATCHES, 2, SIZE // 2)).astype(np.float32)
    targets[list(bad), device] = target
    return inputs, targets.reshape(-1, 1)


def trained(make: Callable[[], Any], *bad: int, device: int = 1, target: float = LARGE, **options: Any) -> Any:
    """Returns a model trained on all batches, in order."""
    model = network()
    model.compile(make(), loss="mse", jit_compile=BACKEND == "jax")
    # Shuffled, the overflow would not stay on one device.
    batches = data(*bad, device=device, target=target)
    model.fit(*batches, batch_size=SIZE, shuffle=False, verbose=0, **options)
    return model


def copies(variable: Any) -> list[Any]:
    """Returns what each device holds of a variable."""
    if BACKEND == "tensorflow":
        return [part.numpy() for part in mirrored().experimental_local_results(variable.value)]
    return [np.asarray(shard.data) for shard in variable.value.addressable_shards]


def ours(policy: Any = POLICY) -> Any:
    return LossScaleOptimizer(SGD(0.01), policy=policy)


@pytest.mark.parametrize("device", [0, 1])
def test_an_overflow_on_one_device_alone_skips_the_step_on_both(device: int) -> None:
    monitor = ScaleMonitor(every=1)
    with two_devices():
        model = trained(ours, 1, 4, device=device, callbacks=[monitor])
        state = model.optimizer.state
        held = [copies(variable) for variable in [*model.variables, *model.optimizer.variables]]
    flags = monitor.found_inf()
    assert flags == [False, True, False, False, True, False]
    assert float(state.scale) == replay(POLICY, found_inf=flags).scales[-1]
    assert (int(state.applied), int(state.skipped)) == (4, 2)
    for first, second in held:
        assert np.isfinite(first).all()
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("device", [0, 1])
def test_a_loss_that_is_nan_on_one_device_alone_leaves_the_scale_as_it_is(device: int) -> None:
    with two_devices():
        model = trained(lambda: ours(Dynamic(init_scale=1024.0)), 1, 3, 4, device=device, target=NAN)
        state = model.optimizer.state
    assert (float(state.scale), int(state.applied), int(state.skipped)) == (1024.0, 3, 3)


def test_clean_steps_are_those_of_one_device() -> None:
    with two_devices():
        on_two = trained(ours).get_weights()
    for left, right in zip(on_two, trained(ours).get_weights(), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)


def test_a_policy_that_predicts_sees_the_largest_gradient_of_both() -> None:
    def scale_after(device: int) -> float:
        with two_devices():
            model = network()
            model.compile(ours(Headroom(init_scale=2.0**10)), loss="mse", jit_compile=BACKEND == "jax")
            inputs, targets = data(0, device=device)
            targets = np.where(targets > 1e6, np.float32(2.0**20), targets)  # large on one device, and finite
            model.fit(inputs[:SIZE], targets[:SIZE], batch_size=SIZE, shuffle=False, verbose=0)
            return float(model.optimizer.state.scale)

    first, second = scale_after(0), scale_after(1)
    assert first == pytest.approx(second, rel=1.0)  # the halves differ a little: a binade at most
    assert max(first, second) < 1.0


@pytest.mark.skipif(BACKEND != "tensorflow", reason="arrays spread over devices are one array on JAX")
def test_keras_own_class_writes_an_overflow_of_the_second_replica_to_the_weights() -> None:
    with two_devices():
        model = trained(lambda: KerasOwn(SGD(0.01), initial_scale=2.0**80), 1)
        weights = [copies(weight)[0] for weight in model.weights]
    assert not any(np.isfinite(weight).all() for weight in weights)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="MirroredStrategy is TensorFlow's")
@pytest.mark.parametrize(
    ("jit_compile", "accumulated", "message"),
    [(True, None, "tfvariable_on_a_different_device"), (False, 2, r"`merge_call` called while defining a new graph")],
)
def test_xla_and_accumulation_do_not_work_under_mirrored_strategy(
    jit_compile: bool, accumulated: int | None, message: str
) -> None:
    with two_devices():
        model = network()
        inner = SGD(0.01, gradient_accumulation_steps=accumulated)
        model.compile(LossScaleOptimizer(inner, policy=POLICY), loss="mse", jit_compile=jit_compile)
        with pytest.raises(Exception, match=message):
            model.fit(*data(), batch_size=SIZE, verbose=0)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="MirroredStrategy is TensorFlow's")
@pytest.mark.parametrize("policy", [POLICY, NoScaling()], ids=["dynamic", "none"])
def test_a_step_between_the_replicas_is_refused(policy: Any) -> None:
    with two_devices():
        model, optimizer = network(), ours(policy)
        grads = [keras.ops.zeros_like(variable) for variable in model.trainable_variables]
        with pytest.raises(
            ValueError, match=r"Received: a call in a cross-replica context of MirroredStrategy\. Call it"
        ):
            optimizer.apply(grads, model.trainable_variables)


def test_a_sampled_step_records_the_gradients_of_the_last_replica() -> None:
    watched = Watch(every=2)
    with two_devices():
        model = trained(ours, 2, callbacks=[watched])
    assert int(model.optimizer.state.skipped) == 1
    rows = [row for row in watched.rows() if (row.step, row.name, row.kind) == (2, "hidden/kernel", "weight_grad")]
    # TensorFlow's replicas have gradients of their own until the inner optimizer sums them; JAX has one array for all.
    assert [row.elements for row in rows] == [12]
    assert rows[0].infs + rows[0].nans > 0
