"""Every preset against scales that its system's own code produced."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.peers.rows import assert_scales, assert_scales_within_error, correctly_rounded, rows
from tests.stories import next_of

from gradscale.peers import PEERS, preset
from gradscale.policies.contract import Seen
from gradscale.record import numbers

ROWS = rows("peer_scale_sequences.json")
MORE_ROWS = rows("more_peer_sequences.json")
"""Odd factors, compiled code, and the ends of the number range."""

ENGINE_ROWS = rows("deepspeed_engine.json")
"""Of DeepSpeed's whole engine, not of its scaler alone."""

ALL_ROWS = ROWS + MORE_ROWS + ENGINE_ROWS


def states_of(row: dict[str, Any]) -> list[Any]:
    policy = preset(row["system"], row["class"], **row["config"])
    state = policy.start()
    states: list[Any] = []
    amaxes = map(float, row.get("amax") or [0.0] * len(row["found_inf"]))
    for found_inf, amax in zip(row["found_inf"], amaxes, strict=True):
        seen = Seen(finite=np.bool_(not found_inf), amax=np.float32(amax), upper_share=np.float32(found_inf))
        state = next_of(policy, state, seen)
        states.append(state)
    return states


def scales_of(row: dict[str, Any]) -> list[float]:
    return [float(state.scale) for state in states_of(row)]


@pytest.mark.parametrize("row", ALL_ROWS, ids=lambda row: row["id"])
def test_preset_gives_the_scales_of_its_peer(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    correctly_rounded(monkeypatch, np)
    assert_scales(row, scales_of(row))


@pytest.mark.parametrize("row", [row for row in ALL_ROWS if row["class"] == "LogMaxScaler"], ids=lambda row: row["id"])
def test_log_max_with_the_c_library_gives_the_scales_of_its_peer_within_the_error_of_both(row: dict[str, Any]) -> None:
    assert_scales_within_error(row, preset(row["system"], row["class"], **row["config"]), scales_of(row))


@pytest.mark.parametrize("row", [row for row in ALL_ROWS if "growth_tracker" in row], ids=lambda row: row["id"])
def test_clean_steps_are_the_growth_tracker_of_the_peer(row: dict[str, Any]) -> None:
    assert [int(state.clean_steps) for state in states_of(row)] == row["growth_tracker"]


@pytest.mark.parametrize("row", [row for row in MORE_ROWS if "decr_count" in row], ids=lambda row: row["id"])
def test_credits_are_what_the_overflows_counted_by_paddle_leave(row: dict[str, Any]) -> None:
    every = row["config"].get("decr_every_n_nan_or_inf", 1)
    assert [every - int(state.credits) for state in states_of(row)] == row["decr_count"]


@pytest.mark.parametrize("row", [row for row in ROWS if "hysteresis_left" in row], ids=lambda row: row["id"])
def test_credits_are_the_hysteresis_left_of_the_peer(row: dict[str, Any]) -> None:
    credits = [int(state.credits) for state in states_of(row)]
    assert credits[: len(row["hysteresis_left"])] == row["hysteresis_left"]


@pytest.mark.parametrize("row", [row for row in ROWS if "raises_at" in row], ids=lambda row: row["id"])
def test_state_is_stuck_where_the_peer_raises_and_not_before(row: dict[str, Any]) -> None:
    states = states_of(row)
    stuck = [bool(state.stuck) for state in states]
    assert stuck[: row["raises_at"] + 1] == [False] * row["raises_at"] + [True]
    if "scale_after_raise" in row:
        assert float(states[row["raises_at"]].scale) == row["scale_after_raise"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_leaves_keep_their_types(row: dict[str, Any]) -> None:
    start = preset(row["system"], row["class"], **row["config"]).start()
    for name, value in numbers(states_of(row)[-1]).items():
        assert value.dtype == getattr(start, name).dtype, name


@pytest.mark.parametrize("row", ROWS + MORE_ROWS, ids=lambda row: row["id"])
def test_no_magnitude_of_a_step_that_overflowed_is_read(row: dict[str, Any]) -> None:
    policy = preset(row["system"], row["class"], **row["config"])
    state = policy.start()
    for magnitude in (1.0, 1e-3, 1e-3):
        found = np.float32(magnitude)
        state = next_of(policy, state, Seen(amax=found, norm=found))
    steps = [
        next_of(policy, state, Seen(finite=np.bool_(False), amax=np.float32(size), norm=np.float32(size)))
        for size in (np.inf, 1.0, 0.0, np.nan)
    ]
    assert len({str(step.to_dict()) for step in steps}) == 1


@pytest.mark.parametrize("row", ROWS + MORE_ROWS, ids=lambda row: row["id"])
@pytest.mark.parametrize("finite", [True, False])
def test_gradients_alone_move_the_scale_and_a_loss_that_is_not_finite_only_counts_as_a_skip(
    row: dict[str, Any], finite: bool
) -> None:
    policy = preset(row["system"], row["class"], **row["config"])
    state = next_of(policy, policy.start(), Seen(amax=np.float32(0.5)))
    seen = Seen(finite=np.bool_(finite), amax=np.float32(0.5 if finite else np.inf))
    moved, with_loss = next_of(policy, state, seen), next_of(policy, state, replace(seen, loss_finite=np.bool_(False)))
    counts = {name: getattr(with_loss, name) for name in ("applied", "skipped", "consecutive_skips")}
    assert str(replace(moved, **counts).to_dict()) == str(with_loss.to_dict())
    if policy.needs:
        assert (counts["skipped"], counts["consecutive_skips"]) == (1, 1)


def test_every_system_but_those_without_runnable_code_has_rows() -> None:
    ours = {"verl"}  # torch's own code, which `test_pytorch_family_rules` runs
    others = {"tf-keras", "paddle", "mindspore", "popart", "chainer"}
    assert set(PEERS) - {row["system"] for row in ROWS} <= others | ours
