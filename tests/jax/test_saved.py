"""Saving and loading: through flax, orbax and JSON, with every field away from its default."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.engine.older_states import FIX, HEADROOM, LOG_MAX, REFUSED_POLICY, REFUSED_STATE
from tests.jax.helpers import params, same

from gradscale import Dynamic, ScaleState
from gradscale.jax import Scaler, scaled
from gradscale.record import fields

POLICY = Dynamic(
    init_scale=96.0,
    growth_factor=3.0,
    backoff_factor=0.25,
    growth_interval=7,
    hysteresis=3,
    refill="clean",
    min_scale=2.0,
    max_scale=4096.0,
)

STATE = ScaleState(
    scale=np.float32(48),
    clean_steps=np.int32(5),
    credits=np.int32(2),
    applied=np.int32(11),
    skipped=np.int32(4),
    consecutive_skips=np.int32(3),
    stuck=np.bool_(True),
)


@pytest.fixture
def serialization() -> Any:
    """Returns flax's module, for tests that have it loaded before they make a scaler."""
    return pytest.importorskip("flax.serialization")


@pytest.fixture
def scaler() -> Scaler:
    return Scaler(POLICY, STATE)


def test_no_field_has_its_default() -> None:
    assert not [f.name for f in fields(POLICY) if getattr(POLICY, f.name) == f.default]
    assert not [f.name for f in fields(STATE) if getattr(STATE, f.name) == f.default]


def test_a_scaler_goes_through_json(scaler: Scaler) -> None:
    assert same(Scaler.from_dict(json.loads(json.dumps(scaler.to_dict()))), scaler)
    assert Scaler.from_dict(scaler.to_dict()).policy == POLICY


def test_a_scaler_goes_through_flax_with_its_settings(serialization: Any, scaler: Scaler) -> None:
    read: Any = serialization.from_bytes(Scaler(), serialization.to_bytes(scaler))
    assert read.policy == POLICY
    assert same(read, scaler)


def test_scales_that_were_mapped_over_go_through_flax(serialization: Any, scaler: Scaler) -> None:
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), scaler)
    assert same(serialization.from_bytes(Scaler(), serialization.to_bytes(many)), many)


def test_an_optimizer_state_goes_through_flax(serialization: Any, scaler: Scaler) -> None:
    tx = scaled(optax.adam(1e-2), POLICY)
    fresh: Any = tx.init(params())
    opt_state = fresh._replace(scaler=scaler)
    read = serialization.from_bytes(fresh, serialization.to_bytes(opt_state))
    assert same(read, opt_state)


def test_a_flax_file_of_another_policys_state_is_refused(serialization: Any, scaler: Scaler) -> None:
    saved: Any = serialization.to_state_dict(scaler)
    saved["state"]["wait"] = np.int32(1)
    with pytest.raises(ValueError, match=r"A state of Dynamic has the fields .*Received: .*'wait'"):
        serialization.from_state_dict(Scaler(), saved)


def test_a_file_of_an_older_rule_is_refused(serialization: Any) -> None:
    with pytest.raises(ValueError, match=REFUSED_POLICY):
        Scaler.from_dict(HEADROOM)
    with pytest.raises(ValueError, match=REFUSED_STATE):
        Scaler.from_dict(LOG_MAX)
    with pytest.raises(ValueError, match=REFUSED_POLICY):
        serialization.from_state_dict(Scaler(), HEADROOM)
    with pytest.raises(ValueError, match=rf"A state of LogMax has the fields .*Received: .*'level'{FIX}"):
        serialization.from_state_dict(Scaler(), LOG_MAX)


def test_a_scaler_goes_through_orbax_beside_its_settings(scaler: Scaler, tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    saved = ocp.args.Composite(
        state=ocp.args.StandardSave(scaler), policy=ocp.args.JsonSave(scaler.to_dict()["policy"])
    )
    target = Scaler(POLICY)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "step", saved)
        read = checkpointer.restore(
            tmp_path / "step",
            ocp.args.Composite(state=ocp.args.StandardRestore(target), policy=ocp.args.JsonRestore()),
        )
    assert same(read["state"], scaler)
    assert Dynamic.from_dict(read["policy"]) == POLICY


def test_a_scaler_read_from_a_file_continues_bit_exactly(scaler: Scaler) -> None:
    read = Scaler.from_dict(scaler.to_dict())
    for value in (1.0, float("inf"), 1.0):
        scaler, read = (one.step(jnp.array([value]))[1] for one in (scaler, read))
        assert same(read, scaler)


def test_a_damaged_dict_is_refused() -> None:
    broken = replace(STATE, scale=np.float32(8192)).to_dict()
    with pytest.raises(ValueError, match="saved scale must lie between the policy's bounds"):
        Scaler.from_dict({"policy": POLICY.to_dict(), "state": broken})


def test_a_pickled_scaler_can_be_used_in_a_process_that_has_made_none(scaler: Scaler, tmp_path: Path) -> None:
    file = tmp_path / "scaler"
    file.write_bytes(pickle.dumps(scaler))
    program = (
        "import jax, pathlib, pickle, sys; scaler = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes());"
        "print(jax.jit(lambda one: one.loss_scale * 2)(scaler), scaler.policy.growth_factor)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=False)
    assert done.stdout == "96.0 3.0\n", done.stderr


@pytest.mark.parametrize(
    ("saved", "kind", "text"),
    [
        ({}, ValueError, "A saved Scaler has the keys"),
        (None, TypeError, "`from_dict` takes what `to_dict` returned. Received: NoneType"),
    ],
)
def test_errors_of_from_dict_name_the_scaler_and_its_methods(saved: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        Scaler.from_dict(saved)
