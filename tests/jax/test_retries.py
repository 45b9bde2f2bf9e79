"""`retries`: the backward pass alone, again at a lower scale, inside the compiled step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.jax.helpers import INF, NAN, base_loss, batch, loss_of, params, programs, same, spiked, trainer

from gradscale import Dynamic, Histogram, NoScaling, Policy, Static, Status
from gradscale.jax import Scaler, value_and_grad
from gradscale.policies.headroom import Headroom

HIGH = Dynamic(init_scale=2.0**24, growth_interval=100)


def test_an_overflow_is_retried_until_it_fits_and_the_batch_is_not_lost() -> None:
    _, grads, scaler, result = jax.jit(value_and_grad(loss_of, retries=20))(Scaler(HIGH), params(), batch())
    fits = float(result.scale)
    expected = jax.jit(value_and_grad(loss_of))(Scaler(Static(fits)), params(), batch())[1]
    assert result.status() is Status.APPLIED
    assert int(result.retries) == np.log2(2.0**24 / fits) > 1
    assert same(grads, expected)
    assert float(scaler.loss_scale) == fits
    assert (int(scaler.state.applied), int(scaler.state.skipped), int(scaler.state.clean_steps)) == (1, 0, 1)


def test_a_step_without_overflow_is_the_same_with_and_without_retries() -> None:
    scaler = Scaler(Dynamic(init_scale=256.0))
    plain = jax.jit(value_and_grad(loss_of, clip_norm=0.1))(scaler, params(), batch())
    retried = jax.jit(value_and_grad(loss_of, clip_norm=0.1, retries=3))(scaler, params(), batch())
    assert same(plain, retried)


def test_when_retries_run_out_the_scale_backs_off_once() -> None:
    _, grads, scaler, result = jax.jit(value_and_grad(spiked, retries=3))(Scaler(HIGH), params(), batch(), NAN)
    assert result.status() is Status.OVERFLOW
    assert (int(result.retries), float(result.scale)) == (3, 2.0**21)
    assert float(scaler.loss_scale) == float(result.next_scale) == 2.0**23
    assert (int(scaler.state.skipped), int(scaler.state.applied)) == (1, 0)
    assert same(grads, jax.tree.map(jnp.zeros_like, params()))


@pytest.mark.parametrize(
    ("policy", "scale_after"),
    [
        (Static(2.0**24), 2.0**24),
        (Dynamic(init_scale=2.0**24, min_scale=2.0**24), 2.0**24),
    ],
)
def test_there_is_no_retry_where_the_scale_cannot_go_lower(policy: Policy, scale_after: float) -> None:
    _, _, scaler, result = jax.jit(value_and_grad(loss_of, retries=5))(Scaler(policy), params(), batch())
    assert (int(result.retries), result.status()) == (0, Status.OVERFLOW)
    assert float(scaler.loss_scale) == scale_after


def test_there_is_no_retry_for_a_loss_that_is_not_finite() -> None:
    _, _, scaler, result = jax.jit(value_and_grad(lambda w, x: loss_of(w, x) * INF, retries=5))(
        Scaler(HIGH), params(), batch()
    )
    assert (int(result.retries), result.status()) == (0, Status.NONFINITE_LOSS)
    assert float(scaler.loss_scale) == 2.0**24


def test_a_retry_backs_off_whatever_the_hysteresis_says_and_spends_none() -> None:
    policy = Dynamic(init_scale=2.0**24, hysteresis=5)
    _, _, scaler, result = jax.jit(value_and_grad(loss_of, retries=20))(Scaler(policy), params(), batch())
    assert result.status() is Status.APPLIED
    assert int(scaler.state.credits) == 5


@pytest.mark.parametrize("policy", [Headroom(init_scale=2.0**24), Histogram(init_scale=2.0**24)])
def test_policies_that_look_at_sizes_can_retry(policy: Policy) -> None:
    result = jax.jit(value_and_grad(loss_of, retries=5))(Scaler(policy), params(), batch())[3]
    assert result.status() is Status.APPLIED
    assert int(result.retries) > 0


def test_nothing_is_retried_where_nothing_is_checked() -> None:
    result = value_and_grad(spiked, retries=5)(Scaler(NoScaling()), params(), batch(), INF)[3]
    assert (int(result.retries), result.status()) == (0, Status.APPLIED)


def test_the_forward_pass_runs_once_and_the_backward_pass_is_compiled_once() -> None:
    def products(retries: int) -> int:
        step = jax.jit(value_and_grad(base_loss, retries=retries))
        return step.lower(Scaler(HIGH), params(), batch()).as_text().count("stablehlo.dot_general")

    assert products(5) == products(0)


def test_the_number_of_retries_in_a_step_compiles_nothing_new() -> None:
    step = trainer(optax.sgd(0.1), loss_of, retries=20)
    weights, scaler, opt_state = params(), Scaler(HIGH), optax.sgd(0.1).init(params())
    counts = []
    for seed in range(3):
        weights, opt_state, scaler, result = step(weights, opt_state, scaler, batch(seed))
        counts.append(int(result.retries))
    assert counts[0] > 1
    assert counts[1:] == [0, 0]
    assert programs(step) == 1


def test_aux_and_scales_of_their_own_go_through_retries() -> None:
    def cost(weights: Any, x: Any) -> Any:
        return loss_of(weights, x), x.sum()

    function = jax.jit(jax.vmap(value_and_grad(cost, has_aux=True, retries=30), in_axes=(None, None, 0)))
    (_, aux), _, scaler, result = function(Scaler(HIGH), params(), jnp.stack([batch(0), batch(1, boost=30.0)]))
    assert aux.shape == (2,)
    assert result.applied.tolist() == [True, True]
    assert scaler.state.scale.tolist() == result.scale.tolist()
    assert len(set(result.retries.tolist())) == 2


def test_a_retried_step_cannot_be_differentiated_and_jax_says_so() -> None:
    with pytest.raises(ValueError, match=r"Reverse-mode differentiation does not work for lax\.while_loop"):
        jax.grad(lambda w: value_and_grad(lambda v: v**2, retries=1)(Scaler(), w)[1])(jnp.float32(1))
