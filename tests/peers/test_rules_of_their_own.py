"""The peers' policies that are no ladders: saved and read back, run as vectors, and run by another framework."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stories import next_of

from gradscale.engine.saved import policy_from_dict
from gradscale.peers import preset
from gradscale.policies.contract import Seen
from gradscale.record import fields, place, with_values
from gradscale.replay.run import replay

CASES: list[tuple[str, str | None, dict[str, Any]]] = [
    ("mxnet", None, {"loss_scale": 100.0, "scale_seq_len": 2, "max_loss_scale": 3000.0}),
    ("mindspore", "DynamicLossScaleManager", {"init_loss_scale": 100.0, "scale_factor": 4.0, "scale_window": 2}),
    ("chainer", None, {"interval": 1}),
    ("popart", None, {"lossScaling": 128.0, "updatePeriod": 2}),
    ("openseq2seq", "LogMaxScaler", {"scale_min": 2.0, "scale_max": 1024.0, "beta1": 0.5, "beta2": 0.75}),
    ("flax", None, {"scale": 2.0**-120, "growth_interval": 1, "minimum_scale": None}),
    ("paddle", None, {"init_loss_scaling": 100.0, "incr_every_n_steps": 2, "decr_every_n_nan_or_inf": 2}),
]
LADDERS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("torch", None, {"growth_factor": 1.5, "backoff_factor": 0.8}),
    ("apex", None, {"max_loss_scale": 1e5}),
    ("apex", "update_scale_hysteresis", {"hysteresis": 1, "growth_interval": 3}),
    ("deepspeed", None, {"consecutive_hysteresis": True, "scale_window": 3}),
    ("megatron", None, {"growth_interval": 3}),
    ("fairseq", None, {"threshold": 0.1, "tolerance": 0.3, "scale_window": 2, "scale_factor": 3}),
    ("fairseq", None, {"min_loss_scale": 0.5, "init_scale": 1.0}),
]
STREAM = st.lists(st.tuples(st.booleans(), st.floats(2.0**-20, 2.0**15, width=32)), min_size=1, max_size=40)


def seen_at(step: tuple[bool, float]) -> Seen:
    finite, amax = step
    return Seen(finite=np.bool_(finite), amax=np.float32(amax), upper_share=np.float32(amax > 1))


def plain(state: Any) -> dict[str, Any]:
    return {field.name: np.asarray(getattr(state, field.name)).tolist() for field in fields(state)}


@pytest.mark.parametrize(("system", "variant", "config"), [*CASES, *LADDERS])
@given(stream=STREAM)
@settings(max_examples=20)
def test_policy_and_state_are_the_same_after_a_dict(
    system: str, variant: str | None, config: dict[str, Any], stream: list[tuple[bool, float]]
) -> None:
    policy: Any = preset(system, variant, **config)
    assert policy_from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    state = policy.start()
    for step in stream:
        state = next_of(policy, state, seen_at(step))
    again = type(state).from_dict(json.loads(json.dumps(state.to_dict())))
    assert plain(next_of(policy, again, seen_at(stream[0]))) == plain(next_of(policy, state, seen_at(stream[0])))


@pytest.mark.parametrize("kind", [None, ["Dynamic"], "ScaleState"])
def test_a_kind_that_is_no_policy_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"A saved policy has a `kind`\. Received: kind="):
        policy_from_dict({"kind": kind})


@pytest.mark.parametrize(("system", "variant", "config"), CASES)
@given(streams=st.lists(STREAM, min_size=2, max_size=4))
@settings(max_examples=20)
def test_vector_of_states_changes_as_each_does_alone(
    system: str, variant: str | None, config: dict[str, Any], streams: list[list[tuple[bool, float]]]
) -> None:
    policy: Any = preset(system, variant, **config)
    start = policy.start()
    alone = [start] * len(streams)
    together = with_values(
        start, {field.name: np.repeat(getattr(start, field.name), len(streams)) for field in fields(start)}
    )
    for steps in zip(*streams, strict=False):
        seen = [seen_at(step) for step in steps]
        stacked = Seen(**{f: np.stack([getattr(one, f) for one in seen]) for f in ("finite", "amax", "upper_share")})
        together = next_of(policy, together, stacked)
        alone = [next_of(policy, state, one) for state, one in zip(alone, seen, strict=True)]
    assert np.asarray(together.scale).tolist() == [float(state.scale) for state in alone]


@pytest.mark.parametrize(("system", "variant", "config"), [case for case in CASES if case[1] != "LogMaxScaler"])
def test_replay_gives_the_scales_of_stepping(system: str, variant: str | None, config: dict[str, Any]) -> None:
    found_inf = np.random.default_rng(1).random(60) < 0.3
    policy: Any = preset(system, variant, **config)
    state, stepped = policy.start(), []
    for flag in found_inf:
        state = next_of(policy, state, Seen(finite=np.bool_(not flag)))
        stepped.append(float(state.scale))
    replayed = replay(policy, found_inf=found_inf, upper_share=found_inf.astype(np.float32))
    assert np.ravel(replayed.scales).tolist() == stepped


@pytest.mark.parametrize(("system", "variant", "config"), CASES)
def test_torch_changes_the_scale_as_numpy_does(system: str, variant: str | None, config: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    policy: Any = preset(system, variant, **config)
    there, theirs = place(policy, torch.from_numpy), place(policy.start(), torch.from_numpy)
    state = policy.start()
    for flag in np.random.default_rng(2).random(60) < 0.3:
        seen = seen_at((not flag, 3.0))
        state = next_of(policy, state, seen)
        theirs = there.next(theirs, place(seen, torch.from_numpy), torch)
        assert float(theirs.scale) == pytest.approx(float(state.scale), rel=2e-6 if system == "openseq2seq" else 1e-7)
