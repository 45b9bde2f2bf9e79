"""A saved scaler: what is read is what was written, and a scale that no gradient can be divided by is refused."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.stories import after, next_of

from gradscale import CheckOnly, Dynamic, Headroom, NoScaling, Seen, preset
from gradscale.engine.saved import check_state, read_saved, write_saved
from gradscale.engine.saved_text import KEY, write_text
from gradscale.numpy import LossScaler

FLOAT64 = {
    "chainer": preset("chainer", interval=3),
    "apex": preset("apex"),
    "mxnet": preset("mxnet"),
    "deepspeed": preset("deepspeed"),
}
FLAGS = (False, False, True, False, False, True, False)


def walked(policy: Any, state: Any, flags: tuple[bool, ...]) -> list[Any]:
    states = []
    for overflow in flags:
        state = next_of(policy, state, Seen(finite=np.bool_(not overflow)))
        states.append(state)
    return states


@pytest.mark.parametrize("name", FLOAT64)
@pytest.mark.parametrize("saved_at", range(len(FLAGS)))
def test_a_rule_in_float64_goes_on_in_float64(name: str, saved_at: int) -> None:
    policy = FLOAT64[name]
    assert policy.start().scale.dtype == np.float64
    state = [policy.start(), *walked(policy, policy.start(), FLAGS)][saved_at]
    saved = read_saved(json.loads(json.dumps(write_saved(policy, state))))
    assert saved.state.scale.dtype == np.float64
    assert walked(saved.policy, saved.state, FLAGS) == walked(policy, state, FLAGS)


@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 2.0**-129, 2.0**-127, 2.0**126 * 1.5, 2.0**127, np.inf])
def test_a_scale_that_gradients_cannot_be_divided_by_is_refused(scale: float) -> None:
    policy = preset("torch")
    state = replace(policy.start(), scale=np.float32(scale))
    for load in (lambda: check_state(policy, state), lambda: read_saved(write_saved(policy, state))):
        with pytest.raises(ValueError, match=r"between 2\*\*-126 and 2\*\*126, .* Received: scale="):
            load()


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**126])
def test_the_ends_of_the_range_load(scale: float) -> None:
    policy = preset("torch")
    state = replace(policy.start(), scale=np.float32(scale))
    assert read_saved(write_saved(policy, state)).state == state


def test_a_scale_outside_the_bounds_of_its_policy_is_refused_with_these_bounds() -> None:
    saved = write_saved(Dynamic(), replace(Dynamic().start(), scale=np.float32(0.5)))
    with pytest.raises(ValueError, match=r"the policy's bounds, 1\.0 and .* Received: scale=0\.5"):
        read_saved(saved)


def test_a_run_without_a_scale_loads() -> None:
    assert read_saved(write_saved(NoScaling(), NoScaling().start())).policy == NoScaling()


def test_the_one_text_of_pytorchs_scaler_is_read_by_every_scaler() -> None:
    plain = write_saved(policy := Headroom(), policy.start(), 0.25)
    assert read_saved({KEY: write_text(plain)}) == read_saved(plain)
    scaler = LossScaler(Dynamic())
    scaler.load_state_dict({KEY: write_text(plain)})
    assert scaler.policy == Headroom()


def test_a_check_alone_goes_through_a_saved_state() -> None:
    state = after(CheckOnly(), "co")
    saved = read_saved(json.loads(json.dumps(write_saved(CheckOnly(), state))))
    assert (saved.policy, saved.state) == (CheckOnly(), state)


def test_a_check_alone_has_no_other_scale_than_one() -> None:
    with pytest.raises(ValueError, match=r"The scale of `CheckOnly` is 1.*Received: scale=1024\.0"):
        LossScaler(CheckOnly(), state=Dynamic(init_scale=1024.0).start())
