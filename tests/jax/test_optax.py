"""`scaled` around every optimizer of optax, on parameters of every type: states and updates as optax alone gives them.

Most of it is traced and not run: types are known without compiling 300 programs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.jax.helpers import EXACT, INF, same
from tests.jax.versions import enable_x64

from gradscale.jax import Scaler, apply, init, scaled, value_and_grad

Make = Callable[[], optax.GradientTransformation]

# `optax.MultiSteps` keeps the real part of complex gradients only.
REAL_ONLY: dict[str, Make] = {
    "adam with chosen types": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "multi_steps with chosen types": lambda: optax.MultiSteps(
        optax.adam(0.1, mu_dtype=jnp.bfloat16), 2
    ).gradient_transformation(),
    "adadelta": lambda: optax.adadelta(0.1),
    "adan": lambda: optax.adan(0.1),
    "fromage": lambda: optax.fromage(0.1),
    "lion": lambda: optax.lion(0.1, weight_decay=0.1),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=0),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(0.1),
    "rprop": lambda: optax.rprop(0.1),
    "sign_sgd": lambda: optax.sign_sgd(0.1),
    "signum": lambda: optax.signum(0.1),
    "sm3": lambda: optax.sm3(0.1),
    "muon": lambda: optax.contrib.muon(0.1),
    "prodigy": lambda: optax.contrib.prodigy(0.1),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "dog": lambda: optax.contrib.dog(1.0),
}

ANY: dict[str, Make] = {
    "adabelief": lambda: optax.adabelief(0.1),
    "adafactor": lambda: optax.adafactor(0.1),
    "adagrad": lambda: optax.adagrad(0.1),
    "adam": lambda: optax.adam(0.1),
    "adamax": lambda: optax.adamax(0.1),
    "adamaxw": lambda: optax.adamaxw(0.1),
    "adamw": lambda: optax.adamw(0.1),
    "amsgrad": lambda: optax.amsgrad(0.1),
    "lamb": lambda: optax.lamb(0.1),
    "lars": lambda: optax.lars(0.1),
    "nadamw": lambda: optax.nadamw(0.1),
    "novograd": lambda: optax.novograd(0.1),
    "optimistic_adam": lambda: optax.optimistic_adam_v2(0.1),
    "polyak_sgd": lambda: optax.polyak_sgd(1.0),
    "radam": lambda: optax.radam(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1, momentum=0.9),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "yogi": lambda: optax.yogi(0.1),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), optax.adam(0.1)),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "partition": lambda: optax.partition({"yes": optax.adam(0.1), "no": optax.set_to_zero()}, {"w": "yes", "b": "no"}),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "schedule": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(0.1, 0.0, 5)),
    "if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "lbfgs": lambda: optax.lbfgs(0.1),
    "lbfgs backtracking": lambda: optax.lbfgs(0.1, linesearch=optax.scale_by_backtracking_linesearch(5)),
}

NEWER = {"optimistic_adam": "optimistic_adam_v2", "signum": "signum"}
"""Optimizers that the oldest supported optax does not have, and their names in it."""

CASES = [(name, make, dtype) for name, make in ANY.items() for dtype in ("float16", "bfloat16", "float32", "complex64")]
CASES += [(name, make, dtype) for name, make in REAL_ONLY.items() for dtype in ("float16", "bfloat16", "float32")]


def parameters(dtype: str) -> Any:
    return {"w": jnp.array([[1.0, -2.0], [0.5, 4.0]], dtype), "b": jnp.array([-1.0, 3.0], dtype)}


def objective(params: Any) -> Any:
    return sum(jnp.sum(jnp.square(jnp.abs(leaf.astype(_wide(leaf))))) for leaf in jax.tree.leaves(params))


def _wide(leaf: Any) -> Any:
    return jnp.promote_types(leaf.dtype, jnp.float32)


def kinds(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.asarray(leaf).dtype), tree)


def gradients(params: Any, scale: float = 1.0) -> Any:
    return jax.tree.map(jnp.conj, jax.grad(lambda params: objective(params) * scale)(params))


def more(name: str, params: Any) -> dict[str, Any]:
    """Returns the further arguments of the update that some optimizers ask for, of the unscaled loss."""
    arguments = {"value": objective(params), "grad": gradients(params)}
    return arguments | {"value_fn": objective} if "lbfgs" in name else {"value": arguments["value"]}


@pytest.mark.parametrize(("name", "make", "dtype"), CASES, ids=[f"{name}-{dtype}" for name, _, dtype in CASES])
def test_state_and_updates_have_the_types_that_optax_alone_gives_them(name: str, make: Make, dtype: str) -> None:
    if (lacking := NEWER.get(name)) and not hasattr(optax, lacking):
        pytest.skip(f"this optax has no {lacking}")
    tx, params = scaled(make(), EXACT), parameters(dtype)

    state: Any = tx.init(params)
    assert kinds(state.inner) == kinds(make().init(params))
    further = more(name, params)
    updates, after = jax.eval_shape(lambda s: tx.update(gradients(params), s, params, **further), state)
    assert jax.tree.map(lambda leaf: leaf.dtype, updates) == jax.tree.map(lambda leaf: leaf.dtype, params)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == kinds(state)


def test_states_can_be_mapped_over_as_those_of_optax() -> None:
    tx, params = scaled(optax.adam(0.1), EXACT), parameters("bfloat16")
    state: Any = optax.tree.map_params(tx, lambda leaf: leaf + 1, tx.init(params))
    assert same(state.inner[0].mu, jax.tree.map(jnp.ones_like, params))
    assert float(state.scaler.loss_scale) == 1024.0


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("adam", "complex64"),
        ("multi_steps", "bfloat16"),
        ("inject_hyperparams", "bfloat16"),
        ("polyak_sgd", "complex64"),
        ("lbfgs backtracking", "bfloat16"),
    ],
)
def test_a_run_is_that_of_optax_in_float32(name: str, dtype: str) -> None:
    make = (ANY | REAL_ONLY)[name]
    tx, alone = scaled(make(), EXACT, wide_state=True), optax.with_extra_args_support(make())

    @jax.jit
    def step(params: Any, state: Any, factor: Any) -> Any:
        grads = jax.tree.map(lambda leaf: leaf * factor, gradients(params, 1024.0))
        updates, state = tx.update(grads, state, params, **more(name, params))
        return optax.apply_updates(params, updates), state

    params, expected = parameters(dtype), jax.tree.map(lambda leaf: leaf.astype(_wide(leaf)), parameters(dtype))
    state, plain = tx.init(params), alone.init(expected)
    for number in range(3):
        if number == 1:
            kept, after = step(params, state, INF)
            assert same((kept, after.inner), (params, state.inner))  # pyright: ignore[reportAttributeAccessIssue]
        params, state = step(params, state, 1.0)
        updates, plain = alone.update(gradients(expected), plain, expected, **more(name, expected))
        expected = optax.apply_updates(expected, updates)
        for own, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(
                own.astype(other.dtype), other, rtol=2e-2 if dtype == "bfloat16" else 1e-4, atol=1e-2
            )


def test_fp16_moments_are_computed_in_float32() -> None:
    # In FP16 the `eps` of Adam is 0 and so is the square of this gradient: optax alone divides 0 by 0.
    tx, params = scaled(optax.adam(0.5), EXACT), jnp.ones(2, jnp.float16)
    grads = jnp.float16([2.0**-14, 0.0])
    alone, _ = optax.adam(0.5).update(grads, optax.adam(0.5).init(params), params)
    updates, _ = tx.update(grads * 1024, tx.init(params), params)
    assert not np.isfinite(np.asarray(alone)).all()
    np.testing.assert_allclose(np.asarray(updates), [-0.5, 0.0], rtol=1e-3)


@pytest.mark.parametrize("params", [{}, {"none": None}, {"empty": jnp.zeros((0, 3), jnp.float16)}, jnp.float16(1)])
def test_trees_of_any_size_are_taken(params: Any) -> None:
    tx = scaled(optax.adam(0.5), EXACT)
    updates, state = jax.jit(tx.update)(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert kinds(updates) == kinds(params)
    assert kinds(state) == kinds(tx.init(params))


def test_lookahead_keeps_the_types_of_both_copies() -> None:
    tx = scaled(optax.lookahead(optax.adam(0.5), sync_period=2, slow_step_size=0.5), EXACT)
    params: Any = optax.LookaheadParams.init_synced(parameters("bfloat16"))
    updates, state = jax.jit(tx.update)(gradients(params.fast, 1024.0), tx.init(params), params)
    assert kinds(updates) == kinds(params)
    assert kinds(state) == kinds(tx.init(params))


@pytest.mark.parametrize("make", [optax.adam, optax.adamw, optax.sgd])
def test_mixed_parameters_keep_their_types_with_injected_hyperparameters_in_float64(make: Any) -> None:
    with enable_x64():
        tx: Any = optax.inject_hyperparams(make)(learning_rate=0.5)
        params = {"narrow": jnp.ones(2, jnp.float32), "wide": jnp.ones(2, jnp.float64)}
        outside = scaled(tx, EXACT)
        updates, state = jax.jit(outside.update)(gradients(params, 1024.0), outside.init(params), params)
        assert kinds(updates) == kinds(params)
        assert kinds(state) == kinds(outside.init(params))
        _, grads, _, result = value_and_grad(objective)(Scaler(EXACT), params)
        after, opt_state = jax.jit(lambda *args: apply(tx, *args))(grads, init(tx, params), params, result)
        assert kinds(after) == kinds(params)
        assert kinds(opt_state) == kinds(tx.init(params))
        np.testing.assert_allclose(after["narrow"], params["narrow"] + updates["narrow"], rtol=1e-6)


def test_a_real_state_that_becomes_complex_is_refused() -> None:
    tx = scaled(optax.ema(0.5), EXACT)
    params = jnp.complex64([1 + 1j])
    with pytest.raises(TypeError, match=r"keep the type of its state.*float32 state that becomes complex64"):
        tx.update(params, tx.init(params.real), params)
