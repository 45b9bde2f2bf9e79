"""A saved scaler: what is read is what was written, and anything else in its place is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.stories import after, next_of

from gradscale import CheckOnly, Dynamic, Headroom, NoScaling, Seen, Static, preset
from gradscale.engine.saved import KEY, LARGEST_FILE, check_state, read_file, read_saved, write_saved, write_text
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


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    policy = Dynamic(init_scale=8.0)
    (tmp_path / "scaler").write_text(json.dumps(write_saved(policy, policy.start())))
    assert read_file(tmp_path / "scaler")[:2] == (policy, policy.start())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must name a JSON file"),
        ("\xff", "must name a JSON file"),
        ("[" * 100_000, "must name a JSON file"),
        ('{"policy": ' + "9" * 10_000, "must name a JSON file"),
        (" " * (LARGEST_FILE + 1), "takes at most 1048576 bytes"),
        ("[]", "takes what `state_dict` returned. Received: list"),
        ('{"policy": 1, "state": {}}', "`policy` of a saved LossScaler must be a mapping. Received: 1"),
        (
            json.dumps({"policy": Static(2.0).to_dict() | {"scale": "x"}, "state": {}}),
            "`Static.scale` must be a number",
        ),
    ],
)
def test_anything_else_is_a_value_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "scaler").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        read_file(tmp_path / "scaler")


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="/dev/zero, which is larger"):
        read_file("/dev/zero")
