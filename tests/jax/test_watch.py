"""`Watch`: what it counts, inside of compiled steps and outside, and at which steps."""

import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gradscale import FP16, Static
from gradscale.histogram import exponent_histogram, losses
from gradscale.jax import Scaler, Watch, value_and_grad
from gradscale.kernels.jax_exponents import CHUNK, counts_and_peaks
from gradscale.watching import WatchRow


def params_of() -> dict[str, Any]:
    first, second = jax.random.split(jax.random.key(0))
    return {"hidden": {"w": jax.random.normal(first, (3, 4))}, "out": {"w": jax.random.normal(second, (4, 2))}}


def loss_of(params: Any, x: Any) -> Any:
    return jnp.mean(jnp.square(jnp.tanh(x @ params["hidden"]["w"]) @ params["out"]["w"]))


BATCH = jax.random.normal(jax.random.key(1), (5, 3))


def row_of(watched: Watch, name: str, kind: str, step: int = 0) -> WatchRow:
    (found,) = [row for row in watched.rows() if (row.step, row.name, row.kind) == (step, name, kind)]
    return found


def test_only_sampled_steps_are_kept() -> None:
    watched = Watch(every=2, steps=[(1, 5)])
    sampled: list[bool] = []
    for _ in range(7):
        sampled.append(watched.sampled)
        watched.step(watched.count(weights=params_of()))
    assert sampled == [False, False, True, False, True, False, False]
    assert sorted({row.step for row in watched.rows()}) == [2, 4]


def test_the_program_between_samples_counts_nothing() -> None:
    watched = Watch()

    def step(params: Any, sampled: bool) -> Any:
        return watched.count(weights=params) if sampled else None

    assert jax.jit(step, static_argnums=1).lower(params_of(), False).as_text().count("stablehlo.") == 0


@pytest.mark.parametrize("scale", [1.0, 2.0**12, 1000.0])
def test_gradients_of_a_compiled_step_are_unscaled_and_the_row_has_their_scale(scale: float) -> None:
    watched, params = Watch(), params_of()

    @jax.jit
    def step(scaler: Scaler, params: Any) -> Any:
        _, grads, _, result = value_and_grad(loss_of)(scaler, params, BATCH)
        return watched.count(weights=params, weight_grads=grads, scale=result.scale), grads

    counts, grads = step(Scaler(Static(scale)), params)
    watched.step(counts)
    row, grad = row_of(watched, "hidden.w", "weight_grad"), np.asarray(grads["hidden"]["w"])
    assert (row.scale, row.amax, row.dtype) == (scale, float(np.abs(grad).max()), "float32")
    assert row.formats["FP16"] == losses(exponent_histogram(grad), FP16, scale)
    assert row_of(watched, "hidden.w", "weight").scale == 1.0


def test_a_row_has_the_facts_of_its_array() -> None:
    watched, array = Watch(), jnp.array([3.0, -0.25, 0.0, jnp.inf, jnp.nan])
    watched.step(watched.count(outputs={"layer": array}))
    row = row_of(watched, "layer", "output")
    assert (row.elements, row.smallest, row.range_bits, row.zeros) == (5, 0.25, 4, 0.2)
    assert (row.infs, row.nans, math.isnan(row.amax)) == (1, 1, True)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        shared = nn.Dense(3, name="shared")
        return nn.Dense(2, name="last")(self.perturb("hidden", shared(shared(x))))


def test_outputs_that_flax_collects_are_named_by_their_modules() -> None:
    net, watched = Net(), Watch()
    variables: Any = net.init(jax.random.key(0), BATCH)
    state: Any
    out, state = net.apply(variables, BATCH, capture_intermediates=True, mutable=["intermediates"])
    watched.step(watched.count(weights=variables["params"], outputs=state["intermediates"]))
    names = {(row.name, row.kind) for row in watched.rows()}
    assert {name for name, kind in names if kind == "output"} == {"(model)", "last", "shared"}
    assert {name for name, kind in names if kind == "weight"} == {
        "last.bias",
        "last.kernel",
        "shared.bias",
        "shared.kernel",
    }
    # The numbers of both calls.
    assert row_of(watched, "shared", "output").elements == 2 * 5 * 3
    assert row_of(watched, "last", "output").amax == float(jnp.abs(out).max())


def test_gradients_of_activations_are_those_of_flax_perturbations() -> None:
    net, watched = Net(), Watch()
    variables: Any = net.init(jax.random.key(0), BATCH)

    def loss(perturbations: Any) -> Any:
        out: Any = net.apply({"params": variables["params"], "perturbations": perturbations}, BATCH)
        return jnp.sum(out)

    grads = jax.grad(loss)(variables["perturbations"])
    watched.step(watched.count(output_grads=grads))
    assert row_of(watched, "hidden", "output_grad").amax == float(jnp.abs(grads["hidden"]).max())


class Sown(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        out = self.linear(x)
        self.sow(nnx.Intermediate, "hidden", out)
        return out


@pytest.mark.skipif(not hasattr(nnx, "capture"), reason="this version of flax has no nnx.capture")
def test_what_nnx_captures_is_named_by_where_it_is() -> None:
    model, watched = Sown(), Watch()
    forward: Any = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)
    out, state = forward(BATCH)
    watched.step(watched.count(weights=nnx.state(model, nnx.Param), outputs=state))
    assert row_of(watched, "hidden", "output").amax == float(jnp.abs(out).max())
    assert {row.name for row in watched.rows() if row.kind == "output"} == {"hidden", "linear", "(model)"}
    assert {row.elements for row in watched.rows() if row.kind == "weight"} == {6, 2}


def test_layers_chooses_arrays_by_their_names() -> None:
    watched = Watch(layers=r"^out\.")
    watched.step(watched.count(weights=params_of()))
    assert {row.name for row in watched.rows()} == {"out.w"}
    with pytest.raises(ValueError, match=r"layers='\^out.*3 arrays, the first of which is 'hidden\.w'"):
        watched.count(weights={"hidden": {"w": BATCH}}, outputs={"a": BATCH, "b": BATCH})


def test_leaves_that_are_no_parameters_are_left_out() -> None:
    watched = Watch()
    tree = {"w": BATCH, "count": jnp.int32(3), "name": None, "_overwrite_with_gradient": {"scale": jnp.ones(1)}}
    watched.step(watched.count(weights=tree, outputs={"tokens": jnp.arange(3), "h": BATCH}))
    assert {row.name for row in watched.rows()} == {"w", "h"}


def test_a_sampled_step_without_counts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Step 0 is sampled\. Received: no counts"):
        Watch().step()


def test_counts_of_several_steps_are_refused() -> None:
    watched = Watch()
    _, counts = jax.lax.scan(lambda _, x: (None, watched.count(outputs={"x": x})), None, BATCH)
    with pytest.raises(ValueError, match=r"those of one step\. Received: some stacked in the shape \(5,\)"):
        watched.step(counts)
    watched.step(jax.tree.map(lambda leaf: leaf[0], counts))
    assert row_of(watched, "x", "output").elements == 3


def test_counts_go_through_a_branch_of_a_compiled_step() -> None:
    watched = Watch()

    @partial(jax.jit, static_argnames="sampled")
    def step(params: Any, sampled: bool) -> Any:
        return jax.tree.map(lambda leaf: leaf * 2, params), watched.count(weights=params) if sampled else None

    params = params_of()
    for _ in range(101):
        params, counts = step(params, sampled=watched.sampled)
        watched.step(counts)
    ratio = row_of(watched, "out.w", "weight", 100).amax / row_of(watched, "out.w", "weight", 0).amax
    assert ratio == 2.0**100


SIZES = (0, 1, 31, 32, 33, 512, 513, 8192, 9000, CHUNK, CHUNK + 1, 2 * CHUNK + 5)
FEW_SIZES = (0, 33, 513, CHUNK + 1)
"""One that is not whole of each kind of block; how blocks are made does not depend on the type."""


@pytest.mark.parametrize(("dtype", "sizes"), [("float16", FEW_SIZES), ("bfloat16", FEW_SIZES), ("float32", SIZES)])
def test_arrays_of_any_size_are_counted_as_each_alone(dtype: str, sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=size) * 10.0 ** rng.integers(-40, 4, size), dtype) for size in sizes]
    arrays.append(jnp.asarray([0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan, 1e-7, 6e-8], dtype))
    bins, outside, peaks = counts_and_peaks(tuple(arrays))
    magnitudes = [np.abs(np.asarray(array).astype(np.float32)) for array in arrays]
    np.testing.assert_array_equal(peaks, [np.max(each, initial=0) for each in magnitudes])
    for place, array in enumerate(arrays):
        expected = exponent_histogram(np.asarray(array))
        np.testing.assert_array_equal(bins[place], expected.counts)
        assert outside[place].tolist() == [expected.zeros, expected.infs, expected.nans]
