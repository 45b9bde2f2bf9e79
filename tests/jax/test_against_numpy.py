"""The same gradients give the same scales, counters and unscaled gradients as the numpy adapter, bit-exactly."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.jax.helpers import INF, NAN, number

from gradscale import Dynamic, Histogram, Policy, Static
from gradscale.jax import Scaler
from gradscale.numpy import LossScaler
from gradscale.policies.headroom import Headroom
from gradscale.policies.log_max import LogMax

POLICIES = [
    Dynamic(init_scale=3.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=2, hysteresis=2, max_scale=1e6),
    Static(1000.0),
    Headroom(init_scale=2.0**10),
    LogMax(init_scale=2.0**10),
    Histogram(init_scale=2.0**10, period=2),
]

DTYPES = {"bfloat16": jnp.bfloat16, "float16": np.float16, "float32": np.float32}

# Not smaller: FP32 numbers below 2**-126 are zero to JAX on a CPU, and quotients of numbers just above come out there.
MAGNITUDES = st.floats(2.0**-14, 2.0**15, width=16)
NUMBERS = st.one_of(MAGNITUDES, MAGNITUDES.map(lambda x: -x))
STEPS = st.lists(
    st.tuples(
        st.lists(NUMBERS, min_size=6, max_size=6),
        st.sampled_from([1.0, 1.0, 0.0, INF, -INF, NAN]),  # what one of them is multiplied by
        st.sampled_from([1.0, 1.0, 1.0, NAN]),  # the loss
    ),
    max_size=12,
)


@jax.jit
def compiled(scaler: Scaler, grads: Any, loss: Any) -> Any:
    return scaler.step(grads, loss)


@partial(jax.jit, static_argnums=2)
def clipped(scaler: Scaler, grads: Any, bound: float) -> Any:
    return scaler.step(grads, clip_norm=bound)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@settings(max_examples=30, deadline=None)
@given(steps=STEPS)
def test_a_run_is_bit_exact(policy: Policy, steps: Any) -> None:
    reference, scaler = LossScaler(policy), Scaler(policy)
    for turn, (values, spike, loss) in enumerate(steps):
        flat = np.array(values)
        flat[turn % 6] *= spike
        pairs = flat.reshape(3, 2)
        grads = {name: pair.astype(dtype) for pair, (name, dtype) in zip(pairs, DTYPES.items(), strict=True)}
        expected = reference.step(grads, loss=np.float32(loss))
        found, scaler, result = compiled(scaler, grads, np.float32(loss))
        assert scaler.to_dict() == reference.state_dict()
        assert result.status() is expected.status()
        assert [culprit.name for culprit in result.culprits()] == [culprit.name for culprit in expected.culprits()]
        if expected.applied:
            assert [np.asarray(found[name]).tobytes() for name in DTYPES] == [
                expected.grads[name].tobytes() for name in DTYPES
            ]


@settings(max_examples=50, deadline=None)
@given(values=st.lists(MAGNITUDES, min_size=4, max_size=4), bound=st.sampled_from([0.01, 1.0, 100.0]))
def test_clipping_is_the_same_up_to_rounding(values: list[float], bound: float) -> None:
    grads = {"a": np.array(values[:2], np.float32), "b": np.array(values[2:], np.float32)}
    expected = LossScaler(Static(8.0)).step(grads, clip_norm=bound)
    found, _, result = clipped(Scaler(Static(8.0)), grads, bound)
    assert number(result.grad_norm) == pytest.approx(number(expected.grad_norm), rel=1e-6)
    np.testing.assert_allclose(found["a"], expected.grads["a"], rtol=1e-6)
