"""A loss that is not finite: `scale_loss` sees it, and a policy keeps its scale; Keras's own rule backs off."""

from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.backend.helpers import (
    BACKEND,
    INF,
    NAN,
    data,
    host,
    network,
    numbers,
    same,
    tensors,
    trained,
    variables,
    weights,
)
from tests.keras.backend.test_fit import MODES

from gradscale import Dynamic, Headroom, Histogram, LogMax, Policy, Status
from gradscale.keras import LossScaleOptimizer

KerasOwn = keras.optimizers.LossScaleOptimizer
SGD = keras.optimizers.SGD
POLICIES: dict[str, Policy] = {
    "headroom": Headroom(),
    "dynamic": Dynamic(),
    "logmax": LogMax(),
    "histogram": Histogram(),
}


def built(policy: Policy | None = None) -> tuple[Any, list[Any]]:
    models = variables([1.0, 2.0])
    optimizer = LossScaleOptimizer(SGD(0.5), policy=policy or Dynamic(init_scale=8.0))
    optimizer.build(models)
    return optimizer, models


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("target", [NAN, 1e20], ids=["nan", "inf, with finite gradients"])
def test_losses_that_are_not_finite_leave_scale_and_weights(target: float, policy: Policy, mode: Any) -> None:
    model = trained(LossScaleOptimizer(SGD(0.125), policy=policy), data(batches=1), **mode)
    before, scale = weights(model), model.optimizer.state.scale
    model.fit(*data(0, 1, 2, batches=3, target=target), batch_size=4, shuffle=False, verbose=0)
    state = model.optimizer.state
    assert (state.scale, state.skipped, state.consecutive_skips) == (scale, 3, 3)
    assert same(before, weights(model))
    model.fit(*data(batches=1), batch_size=4, verbose=0)
    assert model.optimizer.state.applied == 2


def test_rule_of_keras_backs_off_as_keras_own_class_does() -> None:
    batches = data(1, 2, 3, target=NAN)
    ours, theirs = (trained(kind(SGD(0.125), 1024.0), batches) for kind in (LossScaleOptimizer, KerasOwn))
    assert host(ours.optimizer.dynamic_scale) == host(theirs.optimizer.dynamic_scale) == 128.0
    assert same(weights(ours), weights(theirs))


@pytest.mark.parametrize("losses", [(NAN,), (1.0, INF), (INF, 1.0)], ids=str)
def test_loss_that_is_scaled_counts_for_the_next_step_alone(losses: tuple[float, ...]) -> None:
    optimizer, models = built()
    for loss in tensors(*losses):
        optimizer.scale_loss(loss)
    result = optimizer.apply_if_finite(tensors([NAN, 1.0]), models)
    assert (result.status(), numbers(result.next_scale)) == (Status.NONFINITE_LOSS, [8.0])
    result = optimizer.apply_if_finite(tensors([NAN, 1.0]), models)
    assert (result.status(), numbers(result.next_scale)) == (Status.OVERFLOW, [4.0])


def test_loss_that_is_given_takes_precedence() -> None:
    optimizer, models = built()
    optimizer.scale_loss(tensors(NAN)[0])
    assert optimizer.apply_if_finite(tensors([8.0, 8.0]), models, loss=1.0).status() is Status.APPLIED
    assert optimizer.apply_if_finite(tensors([8.0, 8.0]), models).status() is Status.APPLIED


@pytest.mark.skipif(BACKEND == "torch", reason="a tensor of torch has a value, wherever it was computed")
def test_loss_of_another_compiled_function_is_not_known() -> None:
    optimizer, models = built()
    if BACKEND == "jax":
        import jax

        mine = [variable.value for variable in optimizer.variables]
        scale = jax.jit(lambda loss: optimizer.scale_loss(loss, mine))
    else:
        import tensorflow as tf

        scale = tf.function(optimizer.scale_loss)
    scale(tensors(NAN)[0])
    result = optimizer.apply_if_finite(tensors([NAN, 1.0]), models)
    assert (result.status(), numbers(result.next_scale)) == (Status.OVERFLOW, [4.0])


def test_loss_from_before_is_no_constant_of_a_compiled_step() -> None:
    model = network()
    optimizer = LossScaleOptimizer(SGD(0.125), policy=Dynamic())
    optimizer.scale_loss(tensors(NAN)[0])
    model.compile(optimizer, loss="mse", jit_compile=BACKEND == "jax")
    model.fit(*data(), batch_size=4, verbose=0)
    assert model.optimizer.state.applied >= 3  # an uncompiled step takes it for its own, once


@pytest.mark.skipif(BACKEND != "jax", reason="a pure function is JAX's way")
def test_loss_inside_a_pure_function_is_known() -> None:
    import jax

    optimizer, models = built()

    def step(mine: Any, theirs: Any, factor: Any) -> Any:
        def loss(theirs: Any) -> Any:
            return optimizer.scale_loss(keras.ops.sum(theirs[0]) * factor, mine)

        return optimizer.stateless_apply(mine, jax.grad(loss)(theirs), theirs)

    mine, theirs = ([variable.value for variable in each] for each in (optimizer.variables, models))
    for run in (step, jax.jit(step)):
        changed, after = run(mine, theirs, np.float32(NAN))
        assert (numbers(*changed), numbers(after[3])) == ([[1.0, 2.0]], [8.0])
        changed, after = run(mine, theirs, np.float32(1.0))
        assert numbers(*changed) == [[0.5, 1.5]]
