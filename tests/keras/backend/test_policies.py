"""Every policy changes the scale bit-exactly as the rule does on numpy, compiled or not."""

from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.backend.helpers import compiled, tensors, variables

from gradscale import Dynamic, Headroom, Histogram, LogMax, NoScaling, Static, preset
from gradscale.keras import LossScaleOptimizer
from gradscale.numpy import LossScaler

POLICIES = {
    "keras": None,
    "dynamic": Dynamic(growth_factor=3.0, backoff_factor=0.3, growth_interval=3, hysteresis=2, refill="clean"),
    "static": Static(3.0),
    "none": NoScaling(),
    "headroom": Headroom(),
    "logmax": LogMax(),
    "histogram": Histogram(period=2),
    "flax": preset("flax"),
}


def gradients(count: int) -> list[Any]:
    """Returns unscaled gradients that wander over twenty binades, with an overflow now and then."""
    rng = np.random.default_rng(0)
    sizes = np.float32(2.0) ** np.cumsum(rng.integers(-2, 3, count)).astype(np.float32)
    found = [np.float32(rng.normal(size=4) * size) for size in sizes]
    for place in rng.choice(count, count // 6, replace=False):
        found[place][place % 4] = (np.inf, np.nan)[place % 2]
    return found


def scaled(grad: Any, scale: float) -> Any:
    with np.errstate(all="ignore"):
        return grad * np.float32(scale)


@pytest.mark.parametrize("name", POLICIES)
def test_states_are_those_of_the_rule_on_numpy(name: str) -> None:
    models = variables(np.zeros(4))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), policy=POLICIES[name])
    optimizer.build(models)
    step, reference = compiled(optimizer, models), LossScaler(optimizer.policy)
    for number, unscaled in enumerate(gradients(24)):
        grad = scaled(unscaled, reference.loss_scale)
        assert step(*tensors(grad)).status() is reference.step({"w": grad}).status(), number
        assert equal(optimizer.state, reference.state), number


def equal(left: Any, right: Any) -> bool:
    return left.to_dict() == right.to_dict()


@pytest.mark.parametrize(("initial_scale", "grad", "end"), [(2.0**126, 1.0, 2.0**126), (2.0**-126, np.inf, 2.0**-126)])
def test_keras_rule_ends_neither_at_infinity_nor_at_zero(initial_scale: float, grad: float, end: float) -> None:
    models = variables([0.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale, 1)
    for _ in range(3):
        optimizer.apply_if_finite(tensors([grad]), models)
    assert optimizer.state.scale == end
