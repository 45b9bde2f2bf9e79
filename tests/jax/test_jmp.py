"""The drop-ins for jmp: jmp's own tests, jmp beside it, and what is fixed."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("jmp")

import jmp as theirs

from gradscale.jax import jmp
from gradscale.peers import import_state

OWN_TESTS = Path(__file__).with_name("jmp_own_tests.py")
CLEAN, OVERFLOW = jnp.array(True), jnp.array(False)


def own_tests(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, str(OWN_TESTS), *arguments], capture_output=True, text=True)


def test_the_tests_of_jmp_pass() -> None:
    run = own_tests()
    assert run.returncode == 0, run.stdout
    ran = re.search(r"Ran (\d+) tests", run.stdout)
    assert ran is not None
    assert int(ran[1]) == 97


def test_the_tests_of_jmp_would_notice_a_fault() -> None:
    run = own_tests("--broken")
    assert run.returncode == 1
    assert "FAIL: test_all_finite" in run.stdout


def test_every_name_of_jmp_is_there() -> None:
    assert set(jmp.__all__) == set(theirs.__all__)


def walked(loss_scale: Any, flags: list[jax.Array]) -> list[tuple[float, int]]:
    """Returns scale and counter after each step."""
    found: list[tuple[float, int]] = []
    for flag in flags:
        loss_scale = loss_scale.adjust(flag)
        found.append((float(loss_scale.loss_scale), int(loss_scale.counter)))
    return found


@pytest.mark.parametrize("scale", [jnp.float32(3), jnp.float16(2**15), jnp.float32(2**100)])
@pytest.mark.parametrize("settings", [{}, {"period": 2}, {"period": 3, "factor": 3}, {"period": 1, "factor": 1.5}])
def test_the_scale_changes_as_in_jmp(scale: jax.Array, settings: dict[str, Any]) -> None:
    flags = [CLEAN] * 7 + [OVERFLOW] * 3 + [CLEAN] * 2 + [OVERFLOW] + [CLEAN] * 4
    lowest = jnp.ones((), scale.dtype)  # jmp's default is float32, and fails with any other type of scale
    expected = walked(theirs.DynamicLossScale(scale, **settings, min_loss_scale=lowest), flags)
    assert walked(jmp.DynamicLossScale(scale, **settings), flags) == expected


def test_a_scale_in_fp16_stays_in_fp16() -> None:
    assert jmp.DynamicLossScale(jnp.float16(2**15)).adjust(OVERFLOW).loss_scale.dtype == jnp.float16


@pytest.mark.parametrize("counter", [2, 3, 4, 5, 8])
def test_a_counter_past_the_period_wraps_round_as_in_jmp(counter: int) -> None:
    settings: Any = {"loss_scale": jnp.float32(8), "counter": jnp.int32(counter), "period": 3}
    expected = walked(theirs.DynamicLossScale(**settings), [CLEAN] * 5)
    assert walked(jmp.DynamicLossScale(**settings), [CLEAN] * 5) == expected


def test_min_loss_scale_survives_jit_which_it_does_not_in_jmp() -> None:
    lowest = jnp.float32(4)
    ours = jmp.DynamicLossScale(jnp.float32(8), min_loss_scale=lowest)
    peer = theirs.DynamicLossScale(jnp.float32(8), min_loss_scale=lowest)
    for _ in range(3):
        ours = jax.jit(lambda scale: scale.adjust(OVERFLOW))(ours)
        peer = jax.jit(lambda scale: scale.adjust(OVERFLOW))(peer)
    assert float(ours.loss_scale) == 4.0
    assert float(peer.loss_scale) == 1.0


def test_every_field_survives_every_transformation() -> None:
    before = jmp.DynamicLossScale(jnp.float32(12), jnp.int32(5), 7, 3, 0.25)

    def scanned(scale: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (carry, None), scale, length=2)[0]

    for transformed in (jax.jit(lambda x: x), scanned, jax.checkpoint(lambda x: x)):
        assert transformed(before) == before
    many = jax.vmap(lambda x: x)(jax.tree_util.tree_map(lambda leaf: jnp.stack([leaf, leaf]), before))
    assert (many.period, many.factor, many.min_loss_scale) == (7, 3, 0.25)


def test_the_leaves_are_the_scale_and_the_counter_by_name() -> None:
    leaves, _ = jax.tree_util.tree_flatten_with_path(jmp.DynamicLossScale(jnp.float32(2)))
    assert [(jax.tree_util.keystr(path), leaf.item()) for path, leaf in leaves] == [(".loss_scale", 2), (".counter", 0)]


def test_a_compiled_step_is_compiled_once() -> None:
    step: Any = jax.jit(lambda scale: scale.adjust(CLEAN))
    scale = jmp.DynamicLossScale(jnp.float32(2))
    for _ in range(3):
        scale = step(scale)
    assert step._cache_size() == 1


def test_a_static_scale_may_be_an_array_in_a_compiled_step_and_keeps_its_type() -> None:
    scale = jmp.StaticLossScale(jnp.float32(65536))
    scaled = jax.jit(lambda scale, loss: scale.scale(loss))(scale, jnp.float16(2))
    assert (float(scaled), scaled.dtype.name) == (131072.0, "float32")
    assert float(scale.unscale(scaled)) == 2.0


@pytest.mark.parametrize("scale", [jmp.NoOpLossScale(), jmp.StaticLossScale(8)])
def test_constant_scales_do_not_move(scale: Any) -> None:
    assert scale.adjust(OVERFLOW) is scale


def test_integers_and_empty_trees_are_finite() -> None:
    assert jmp.all_finite({"count": jnp.arange(3), "empty": jnp.ones(0), "number": 3})
    assert not jmp.all_finite([jnp.arange(3), jnp.complex64(complex(0, np.nan))])


def test_the_result_of_all_finite_is_a_scalar_on_the_device() -> None:
    flag = jax.jit(jmp.all_finite)([jnp.ones(3), jnp.ones(2)])
    assert (flag.shape, flag.dtype.name) == ((), "bool")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"period": 0}, ValueError, "`period` must be"),
        ({"period": 2.5}, TypeError, "`period` must be"),
        ({"factor": 0.0}, ValueError, "`factor` must be positive"),
        ({"min_loss_scale": -1.0}, ValueError, "`min_loss_scale` must not be negative"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(settings: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        jmp.DynamicLossScale(jnp.float32(2), **settings)


def test_a_setting_that_is_not_known_yet_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`min_loss_scale` is static .*Make the loss scale outside of `jax\.jit`"):
        jax.jit(lambda low: jmp.DynamicLossScale(jnp.float32(2), min_loss_scale=low).loss_scale)(1.0)


def test_a_flag_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"Expected boolean scalar\. Received: `grads_finite` of shape \(2,\)\."):
        jmp.DynamicLossScale(jnp.float32(2)).adjust(jnp.ones(2, bool))


def test_the_leaves_of_a_saved_scale_go_on_in_gradscale() -> None:
    scale = jmp.DynamicLossScale(jnp.float32(64), period=5).adjust(CLEAN)
    _, state = import_state("jmp", {"loss_scale": scale.loss_scale, "counter": scale.counter, "period": 5})
    assert (float(state.scale), int(state.clean_steps)) == (64.0, 1)


def test_the_scale_stays_where_gradients_can_be_divided_by_it() -> None:
    high = jmp.DynamicLossScale(jnp.float32(2**125), period=1)
    low = jmp.DynamicLossScale(jnp.float32(2.0**-125), min_loss_scale=0.0)
    for _ in range(3):
        high, low = high.adjust(CLEAN), low.adjust(OVERFLOW)
    assert (high.loss_scale, low.loss_scale) == (2.0**126, 2.0**-126)
    # jmp goes on to 2**127 and to 0: gradients become 0 there, or NaN.
    assert high.unscale({"weight": jnp.float32(2**120)})["weight"] == 2.0**-6
    assert low.unscale({"weight": jnp.float32(0)})["weight"] == 0
