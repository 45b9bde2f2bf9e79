"""`value_and_grad`: unscaled gradients of any pytree, or zeros, and the next scale."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.jax.helpers import EXACT, INF, NAN, POLICY, base_loss, batch, loss_of, number, params, programs, same, spiked
from tests.jax.versions import enable_x64

from gradscale import BF16, Dynamic, NoScaling, Policy, Static, Status
from gradscale.engine import bf16
from gradscale.engine.culprits import Culprit
from gradscale.jax import Scaler, value_and_grad
from gradscale.policies.headroom import Headroom
from gradscale.policies.log_max import LogMax


def test_value_and_gradients_are_those_of_jax_bit_exactly() -> None:
    value, grads, _, result = jax.jit(value_and_grad(base_loss))(Scaler(EXACT), params(), batch())
    expected = jax.jit(jax.value_and_grad(base_loss))(params(), batch())
    assert same((value, grads), expected)
    assert result.status() is Status.APPLIED


def test_eager_and_compiled_results_are_the_same() -> None:
    function = value_and_grad(base_loss, clip_norm=0.125)
    eager = function(Scaler(POLICY), params(), batch())
    compiled = jax.jit(function)(Scaler(POLICY), params(), batch())
    assert jax.tree.structure(eager) == jax.tree.structure(compiled)
    for one, other in zip(jax.tree.leaves(eager), jax.tree.leaves(compiled), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("spike", [INF, -INF, NAN])
def test_a_bad_gradient_makes_all_of_them_zero_and_lowers_the_scale(spike: float) -> None:
    _, grads, scaler, result = jax.jit(value_and_grad(spiked))(Scaler(POLICY), params(), batch(), spike)
    assert result.skipped()
    assert result.status() is Status.OVERFLOW
    assert same(grads, jax.tree.map(jnp.zeros_like, params()))
    assert (float(result.scale), float(result.next_scale), float(scaler.loss_scale)) == (1024.0, 512.0, 512.0)
    assert result.culprits() == [Culprit("out", "nan" if spike != spike else "inf")]


def test_a_bad_loss_skips_the_step_and_leaves_the_scale_alone() -> None:
    value, grads, scaler, result = value_and_grad(lambda w, x: base_loss(w, x) * NAN)(Scaler(POLICY), params(), batch())
    assert np.isnan(value)
    assert result.status() is Status.NONFINITE_LOSS
    assert float(scaler.loss_scale) == 1024.0
    assert same(grads, jax.tree.map(jnp.zeros_like, params()))


def test_fp16_compute_gives_float32_gradients_near_those_of_float32() -> None:
    _, grads, _, result = jax.jit(value_and_grad(loss_of))(Scaler(POLICY), params(), batch())
    expected = jax.grad(base_loss)(params(), batch())
    assert result.status() is Status.APPLIED
    for name, grad in grads.items():
        assert grad.dtype == jnp.float32
        np.testing.assert_allclose(grad, expected[name], atol=5e-3)


def test_gradients_that_vanish_in_fp16_are_saved_by_the_scale() -> None:
    def tiny(weight: Any) -> Any:
        return jnp.sum(weight.astype(jnp.float16).astype(jnp.float32)) * 2.0**-30

    unscaled = value_and_grad(tiny)(Scaler(NoScaling()), jnp.ones(2))[1]
    saved = value_and_grad(tiny)(Scaler(Static(2.0**16)), jnp.ones(2))[1]
    assert (unscaled.tolist(), saved.tolist()) == ([0.0, 0.0], [2.0**-30, 2.0**-30])


def test_narrow_and_integer_leaves_keep_their_places() -> None:
    tree = {"half": jnp.ones(2, jnp.float16), "brain": jnp.ones(2, jnp.bfloat16), "count": jnp.int32(7), "none": None}

    def cost(weights: Any) -> Any:
        return (
            jnp.sum(weights["half"].astype(jnp.float32) * 3 + weights["brain"].astype(jnp.float32)) * weights["count"]
        )

    grads = value_and_grad(cost)(Scaler(EXACT), tree)[1]
    assert {name: None if leaf is None else leaf.dtype.name for name, leaf in grads.items()} == {
        "half": "float32",
        "brain": "float32",
        "count": "int32",
        "none": None,
    }
    assert (grads["half"].tolist(), grads["brain"].tolist(), int(grads["count"])) == ([21.0, 21.0], [7.0, 7.0], 0)


def test_a_random_key_among_the_parameters_is_left_alone() -> None:
    tree = {"w": jnp.ones(2), "key": jax.random.key(0)}
    grads = value_and_grad(lambda p: jnp.sum(p["w"] * jax.random.normal(p["key"], (2,))))(Scaler(EXACT), tree)[1]
    assert same(grads["w"], jax.random.normal(jax.random.key(0), (2,)))
    assert same(grads["key"], jnp.int32(0))


def test_empty_leaves_and_python_numbers_are_gradients_like_any_other() -> None:
    grads = value_and_grad(lambda p: p["b"] * 2 + jnp.sum(p["e"]))(Scaler(EXACT), {"b": 1.5, "e": jnp.ones((0, 3))})[1]
    assert float(grads["b"]) == 2.0
    assert grads["e"].shape == (0, 3)


def test_complex_gradients_are_those_of_jax() -> None:
    def cost(weight: Any) -> Any:
        return jnp.sum(jnp.abs(weight) ** 2)

    weight = jnp.array([3 + 4j, 1j], jnp.complex64)
    _, grads, _, result = value_and_grad(cost, norm=True)(Scaler(EXACT), weight)
    np.testing.assert_array_equal(grads, jax.grad(cost)(weight))
    assert number(result.grad_norm) == pytest.approx(2 * 26**0.5)


def test_float64_gradients_stay_float64() -> None:
    with enable_x64():
        grads, scaler = value_and_grad(lambda w: w * (1 + 2.0**-40))(Scaler(POLICY), jnp.float64(1))[1:3]
        assert float(grads) == 1 + 2.0**-40
        assert {leaf.dtype.name for leaf in jax.tree.leaves(scaler)} == {"float32", "int32", "bool"}


def test_parameters_without_a_floating_point_leaf_give_no_gradients() -> None:
    _, grads, scaler, result = value_and_grad(lambda p: p * 1.0, retries=2)(Scaler(POLICY), jnp.int32(3))
    assert result.status() is Status.NO_GRADS
    assert int(grads) == 0
    assert same(scaler, Scaler(POLICY))


def test_aux_comes_with_the_value() -> None:
    (value, aux), grads, _, _ = value_and_grad(lambda w: (w**2, {"w": w}), has_aux=True)(Scaler(EXACT), jnp.float32(3))
    assert (float(value), float(aux["w"]), float(grads)) == (9.0, 3.0, 6.0)


def test_the_scaler_can_be_donated_by_its_name() -> None:
    step = jax.jit(value_and_grad(base_loss), donate_argnames="scaler")
    scaler = Scaler(POLICY)
    step(scaler, params(), batch())
    assert scaler.loss_scale.is_deleted()


def test_arguments_are_chosen_by_number_and_keywords_pass_through() -> None:
    def cost(first: Any, second: Any, *, power: int) -> Any:
        return first * second**power

    scaler, args = Scaler(EXACT), (jnp.float32(2), jnp.float32(3))
    assert float(value_and_grad(cost, argnums=1)(scaler, *args, power=2)[1]) == 12.0
    assert float(value_and_grad(cost, argnums=-1)(scaler, *args, power=2)[1]) == 12.0
    grads = value_and_grad(cost, argnums=(1, 0))(scaler, *args, power=2)[1]
    assert [float(grad) for grad in grads] == [12.0, 9.0]


def test_clipping_bounds_the_unscaled_norm_and_reports_it() -> None:
    cost = value_and_grad(lambda w: jnp.sum(w * jnp.array([3.0, 4.0])), clip_norm=2.5)
    _, grads, _, result = cost(Scaler(EXACT), jnp.ones(2))
    assert number(result.grad_norm) == 5.0
    np.testing.assert_allclose(grads, [1.5, 2.0], rtol=1e-6)


def test_the_norm_is_reported_without_clipping_when_asked_for() -> None:
    plain, asked = (value_and_grad(lambda w: jnp.sum(w * 3.0), norm=norm) for norm in (False, True))
    assert plain(Scaler(EXACT), jnp.ones(1))[3].grad_norm is None
    _, grads, _, result = asked(Scaler(EXACT), jnp.ones(1))
    assert (number(result.grad_norm), grads.tolist()) == (3.0, [3.0])


@pytest.mark.parametrize("kind", [partial(Headroom, format=BF16), partial(LogMax, format=BF16), Dynamic])
def test_a_norm_that_overflows_skips_the_step_and_never_clips_to_zero(kind: Any) -> None:
    scaler = Scaler(kind(init_scale=2.0**100))
    function = jax.jit(value_and_grad(lambda w: jnp.sum(3.0 * w), clip_norm=1.0))
    seen = set()
    for _ in range(60):
        _, grads, scaler, result = function(scaler, jnp.ones(4))
        seen.add(result.status())
        np.testing.assert_allclose(grads, 0.0 if result.skipped() else 0.5, rtol=1e-5)
    assert seen == {Status.APPLIED, Status.OVERFLOW}


@pytest.mark.parametrize("policy", [Headroom(format=BF16), LogMax(format=BF16)])
def test_a_policy_for_bf16_skips_nothing_where_gradients_are_clipped(policy: Policy) -> None:
    function, scaler = jax.jit(value_and_grad(lambda w: jnp.sum(3.0 * w), clip_norm=1.0)), Scaler(policy)
    for _ in range(60):
        _, _, scaler, _ = function(scaler, jnp.ones(4))
    assert int(scaler.state.skipped) == 0


def test_the_largest_gradient_reaches_a_policy_that_follows_it() -> None:
    _, _, scaler, result = value_and_grad(lambda w: jnp.sum(w * 2.0**-10), clip_norm=1.0)(
        Scaler(Headroom()), jnp.ones(2)
    )
    assert number(result.amax) == 2.0**-10
    assert float(scaler.loss_scale) == 2.0**19, "4 bits below the largest that keeps it two bits below 65504"


@pytest.mark.parametrize("spike", [INF, NAN])
def test_largest_magnitude_and_norm_of_an_overflow_are_infinite(spike: float) -> None:
    result = jax.jit(value_and_grad(spiked, norm=True))(Scaler(Headroom()), params(), batch(), spike)[3]
    assert (number(result.amax), number(result.grad_norm)) == (INF, INF)


def test_a_float64_gradient_too_large_for_float32_is_the_largest_float32_to_a_policy() -> None:
    with enable_x64():
        scaler = Scaler(Headroom())
        grads, after, result = jax.jit(lambda scaler, grad: scaler.step(grad))(scaler, jnp.array([1e300, 1.0]))
        assert float(grads[0]) == 1e300 / float(scaler.loss_scale)
        assert float(result.amax) == np.finfo(np.float32).max
        assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [leaf.dtype for leaf in jax.tree.leaves(scaler)]


def test_no_scaling_checks_nothing_and_lets_everything_through() -> None:
    _, grads, scaler, result = jax.jit(value_and_grad(spiked))(Scaler(NoScaling()), params(), batch(), INF)
    assert np.isinf(grads["out"][0, 0])
    assert (result.sizes, result.gated, result.status()) == (None, False, Status.APPLIED)
    assert int(scaler.state.applied) == 1


def test_gradients_of_gradients_go_through() -> None:
    def slope(weight: Any) -> Any:
        return value_and_grad(lambda w: w**3)(Scaler(EXACT), weight)[1]

    assert float(jax.grad(slope)(jnp.float32(2))) == 12.0


def test_a_gradient_of_zero_has_a_derivative_though_it_is_clipped() -> None:
    def slope(weight: Any) -> Any:
        return value_and_grad(lambda w: w**2, clip_norm=1.0)(Scaler(EXACT), weight)[1]

    assert float(jax.grad(slope)(jnp.float32(0))) == 2.0


def test_methods_of_one_step_are_refused_on_stacked_results() -> None:
    results = jax.vmap(lambda grad: Scaler(EXACT).step(grad)[2])(jnp.array([1.0, INF]))
    for ask in (lambda: results.skipped(), lambda: results.status(), lambda: results.culprits()):
        with pytest.raises(ValueError, match=r"result of one step\..*the shape \(2,\).*Take one: `jax\.tree\.map"):
            ask()
    assert jax.tree.map(lambda leaf: leaf[1], results).culprits() == [Culprit("grads", "inf")]


def test_examples_can_be_mapped_over() -> None:
    gradients = jax.jit(jax.vmap(value_and_grad(base_loss), in_axes=(None, None, 0)))
    _, grads, _, result = gradients(Scaler(EXACT), params(), batch()[:, None])
    assert grads["out"].shape == (8, 8, 2)
    assert result.applied.shape == (8,)


def test_select_chooses_what_to_keep() -> None:
    new, old = {"mean": jnp.float32(2)}, {"mean": jnp.float32(1)}
    good, bad = (jax.jit(value_and_grad(spiked))(Scaler(POLICY), params(), batch(), spike)[3] for spike in (0.0, INF))
    assert float(good.select(new, old)["mean"]) == 2.0
    assert float(bad.select(new, old)["mean"]) == 1.0


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (lambda w: jnp.sum(w).astype(jnp.int32), r"A loss must be a floating-point number\. Received: int32"),
        (lambda w: jnp.sum(w).astype(jnp.float16), r"A loss must be float32 or wider.*Received: float16\. Cast the"),
        (lambda w: jnp.sum(w).astype(jnp.bfloat16), r"A loss must be float32 or wider.*Received: bfloat16"),
        (lambda w: w, r"`fun` must return a loss without dimensions\. Received: shape \(2,\)\. Take the mean"),
        (lambda w: (jnp.sum(w), w), r"A loss must be one number\. Received: tuple.*pass `has_aux=True`"),
        (lambda w: None, r"A loss must be one number\. Received: NoneType"),
        (lambda w: jnp.sum(w) * 1j, r"A loss must be a floating-point number\. Received: complex64"),
    ],
)
def test_a_loss_that_cannot_be_meant_is_refused(fun: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        value_and_grad(fun)(Scaler(), jnp.ones(2))


def test_a_bfloat16_loss_is_taken_where_nothing_is_scaled() -> None:
    grads = value_and_grad(lambda w: jnp.sum(w).astype(jnp.bfloat16))(Scaler(NoScaling()), jnp.ones(2))[1]
    assert grads.tolist() == [1.0, 1.0]


def test_has_aux_needs_a_pair() -> None:
    with pytest.raises(TypeError, match=r"With `has_aux=True`, `fun` must return \(loss, aux\)"):
        value_and_grad(lambda w: w, has_aux=True)(Scaler(), jnp.float32(1))


def test_a_leaf_that_is_no_array_is_left_alone_and_has_no_gradient() -> None:
    tree = {"layer": {"activation": jnp.tanh, "name": "hidden", "w": jnp.float32(0)}}
    _, grads, _, result = value_and_grad(lambda p: p["layer"]["activation"](p["layer"]["w"]))(Scaler(), tree)
    assert grads == {"layer": {"activation": None, "name": None, "w": 1.0}}
    assert result.names == ("layer.w",)


def test_the_scaler_comes_first() -> None:
    with pytest.raises(TypeError, match=r"The first argument must be a `Scaler`.*Received: dict"):
        value_and_grad(base_loss)(params(), batch())  # pyright: ignore[reportArgumentType]


def test_an_argument_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`argnums` counts the positional.*Received: argnums=1 and 1 of them"):
        value_and_grad(lambda w: w, argnums=1)(Scaler(), jnp.float32(1))


def test_positions_may_be_numpys_integers() -> None:
    second: Any = np.int64(1)
    grads = value_and_grad(lambda w, x: w * x, second)(Scaler(EXACT), 3.0, 2.0)[1]
    assert float(grads) == 3.0


@pytest.mark.parametrize("argnums", [0.0, "0", True, (0, None)])
def test_positions_that_are_no_integers_are_refused(argnums: Any) -> None:
    with pytest.raises(TypeError, match=r"`argnums` must be an integer, or a tuple of them\. Received: argnums="):
        value_and_grad(lambda w: w, argnums)


@pytest.mark.parametrize("argnums", [(0, 0), (0, -2)])
def test_an_argument_chosen_twice_is_refused(argnums: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"each argument at most once\. Received: argnums=\(0, "):
        value_and_grad(lambda w, x: w * x, argnums)(Scaler(), 1.0, 2.0)


def test_an_axis_that_is_not_mapped_is_refused() -> None:
    with pytest.raises(ValueError, match=r"An axis must be mapped.*Received: 'batch'\. Found here: \[\]"):
        value_and_grad(lambda w: w, axis_names="batch")(Scaler(), jnp.float32(1))


def test_bad_settings_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"`retries` must not be negative\. Received: retries=-1"):
        value_and_grad(base_loss, retries=-1)
    with pytest.raises(TypeError, match=r"`retries` must be an integer\. Received: retries=True"):
        value_and_grad(base_loss, retries=True)
    with pytest.raises(ValueError, match=r"`clip_norm` must be greater than 0\. Received: clip_norm=0"):
        value_and_grad(base_loss, clip_norm=0)


def test_a_policy_of_another_kind_compiles_a_program_of_its_own() -> None:
    function = jax.jit(value_and_grad(base_loss))
    for policy in (POLICY, Dynamic(init_scale=2.0), POLICY):
        assert float(function(Scaler(policy), params(), batch())[3].scale) == policy.init_scale
    assert programs(function) == 2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "notes"), [("bfloat16", 1), ("float16", 0), ("float32", 0)])
def test_a_loss_computed_in_bf16_is_noted_once_as_one_that_needs_no_scaler(
    dtype: str, notes: int, compiled: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bf16, "_noted", [])

    def loss(weight: Any, x: Any) -> Any:
        return jnp.mean((x.astype(dtype) @ weight.astype(dtype)).astype(jnp.float32) ** 2)

    for policy in ("dynamic", "dynamic", "none"):
        step = value_and_grad(loss)
        (jax.jit(step) if compiled else step)(Scaler(policy), jnp.ones((3, 2)), jnp.ones((2, 3)))
    assert len(caplog.messages) == notes
    assert all("`value_and_grad` scales a loss that was computed in BF16" in each for each in caplog.messages)


def test_scaler_in_the_place_of_the_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Received: a Scaler first\. Call it as `value_and_grad\(fun\)\(scaler"):
        value_and_grad(Scaler(), lambda w: w)  # pyright: ignore[reportArgumentType]
