"""Saving and loading the drop-in: its own state and torch's, in every order, and by pickle and copy."""

import copy
import io
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.older_states import HEADROOM, LOG_MAX, REFUSED_POLICY, REFUSED_STATE
from tests.torch.drop_in.helpers import OURS, TORCH, give, parameter, ready

from gradscale import CheckOnly, Dynamic, Headroom, Histogram, Static
from gradscale.engine import saved as engine_saved
from gradscale.peers import export_state, preset
from gradscale.torch import GradScaler

KEYS = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "torch's numbers": {"init_scale": 3.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 5},
    "bounds": {"min_scale": 0.5, "max_scale": 2.0**20},
    "hysteresis": {"hysteresis": 3, "growth_interval": 4},
    "headroom": {"policy": Headroom()},
    "histogram": {"policy": Histogram()},
    "static": {"policy": Static(64.0)},
    "plain dynamic": {"policy": Dynamic(growth_interval=3)},
    "preset": {"policy": preset("deepspeed")},
}


def run(scaler: Any, overflows: list[bool]) -> list[float]:
    """Returns the scales of a run with the given overflows."""
    owner = parameter()
    optimizer = torch.optim.SGD([owner], lr=0.0)
    scales = []
    for index, overflow in enumerate(overflows):
        ready(scaler)
        give((owner, torch.inf if overflow else scaler.get_scale() * 2.0**-index))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


BEFORE = [False, True, False, False, True]
AFTER = [False, True, True, False, False, False, False, False, True]


@pytest.mark.parametrize("kind", [OURS, TORCH])
@pytest.mark.parametrize("source_has_run", [False, True])
@pytest.mark.parametrize("target_has_run", [False, True])
def test_default_state_is_torchs_and_goes_both_ways(source_has_run: bool, target_has_run: bool, kind: Any) -> None:
    other = TORCH if kind is OURS else OURS
    source = kind("cpu", init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2)
    target = other("cpu", init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1)
    target._init_growth_tracker = 7
    if source_has_run:
        run(source, BEFORE)
    if target_has_run:
        run(target, [False])
    saved = source.state_dict()
    assert list(saved) == KEYS
    target.load_state_dict(saved)
    assert target.state_dict() == saved
    assert run(target, AFTER) == run(source, AFTER)


@pytest.mark.parametrize("target_has_run", [False, True])
@pytest.mark.parametrize("source_has_run", [False, True])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_saved_scaler_is_resumed_bit_exactly(name: str, source_has_run: bool, target_has_run: bool) -> None:
    source = GradScaler("cpu", **CONFIGURATIONS[name])
    if source_has_run:
        run(source, BEFORE)
    target = GradScaler("cpu")
    if target_has_run:
        run(target, [False])
    saved = source.state_dict()
    target.load_state_dict(through_a_file(saved))
    assert target.state_dict() == saved
    assert run(target, AFTER) == run(source, AFTER)
    assert target.state_dict() == source.state_dict()


def through_a_file(saved: dict[str, Any]) -> dict[str, Any]:
    """Returns what `torch.load` makes of it without executing anything."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_torch_loads_whatever_was_saved(name: str) -> None:
    source, target = GradScaler("cpu", **CONFIGURATIONS[name]), TORCH("cpu")
    run(source, BEFORE)
    target.load_state_dict(source.state_dict())
    assert target.state_dict() == {key: source.state_dict()[key] for key in KEYS}


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
@pytest.mark.parametrize("has_run", [False, True])
def test_copy_goes_on_by_itself(name: str, copied: Any, has_run: bool) -> None:
    source = GradScaler("cpu", **CONFIGURATIONS[name])
    if has_run:
        run(source, BEFORE)
    twin, before = copied(source), source.state_dict()
    assert twin.state_dict() == before
    scales = run(twin, AFTER)
    assert source.state_dict() == before
    assert scales == run(source, AFTER)


def test_copy_keeps_the_form_of_the_states_of_its_optimizers() -> None:
    twin = pickle.loads(pickle.dumps(GradScaler("cpu")))
    assert twin._per_optimizer_states["new"] == torch.amp.grad_scaler._refresh_per_optimizer_state()
    assert twin.last is None


def test_disabled_scaler_is_copied() -> None:
    assert not pickle.loads(pickle.dumps(GradScaler("cpu", enabled=False))).is_enabled()


def test_torchs_state_replaces_the_numbers_of_a_scaler_with_hysteresis() -> None:
    source = TORCH("cpu", init_scale=32.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    run(source, [False])
    target = GradScaler("cpu", hysteresis=2)
    target.load_state_dict(source.state_dict())
    assert (target.get_scale(), target._get_growth_tracker()) == (32.0, 1)
    assert run(target, [False, False, True, True]) == [32.0, 128.0, 128.0, 32.0]


def test_torchs_state_gives_another_policy_its_scale() -> None:
    source = TORCH("cpu", init_scale=32.0)
    target = GradScaler("cpu", policy=Headroom())
    target.load_state_dict(source.state_dict())
    assert target.get_scale() == 32.0
    assert target._rule.policy == Headroom()  # type: ignore[union-attr]


def test_scale_set_by_hand_is_saved_in_both_places() -> None:
    scaler = GradScaler("cpu", hysteresis=2)
    run(scaler, [False, False])
    scaler.update(512.0)
    saved = scaler.state_dict()
    state = json.loads(saved["gradscale"])["state"]
    assert (saved["scale"], state["scale"]) == (512.0, 512.0)
    assert (saved["_growth_tracker"], state["clean_steps"]) == (2, 2)


@pytest.mark.parametrize("settings", [{"hysteresis": 3}, {"policy": Headroom()}, {"min_scale": 2.0}])
def test_an_entry_that_is_no_text_yet_is_read(settings: dict[str, Any]) -> None:
    saved = GradScaler("cpu", **settings).state_dict()
    scaler = GradScaler("cpu")
    scaler.load_state_dict(saved | {"gradscale": json.loads(saved["gradscale"])})
    assert scaler.state_dict() == saved


def test_static_scale_exported_for_torch_is_loaded() -> None:
    saved = export_state("torch", Static(64.0), Static(64.0).start())
    scaler = GradScaler("cpu")
    scaler.load_state_dict(saved)
    assert run(scaler, [True, False, True]) == [64.0] * 3


@pytest.mark.parametrize(("scale", "loaded"), [(0.5, 1.0), (2.0**30, 1024.0), (8.0, 8.0)])
def test_saved_scale_is_brought_within_the_bounds(scale: float, loaded: float) -> None:
    scaler = GradScaler("cpu", init_scale=8.0, min_scale=1.0, max_scale=1024.0)
    scaler.load_state_dict(TORCH("cpu", init_scale=scale).state_dict())
    assert scaler.get_scale() == loaded


def test_tracker_past_the_interval_is_kept_and_grows_at_the_next_clean_step() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    saved = scaler.state_dict() | {"_growth_tracker": 9, "growth_interval": 3}
    scaler.load_state_dict(saved)
    assert scaler.state_dict() == saved
    assert run(scaler, [False]) == [16.0]


BESIDE = {"gradscale": GradScaler("cpu", hysteresis=2).state_dict()["gradscale"]}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"growth_factor": 0.5}, AssertionError, r"The growth factor must be > 1\.0\."),
        ({"backoff_factor": 0.0}, ValueError, r"`backoff_factor` must be greater than 0"),
        ({"growth_interval": 0}, ValueError, r"`growth_interval` must be at least 1"),
        ({"_growth_tracker": -1}, ValueError, r"`_growth_tracker` must be a count of steps, .*=-1\."),
        ({"_growth_tracker": 1.5}, ValueError, r"`_growth_tracker` must be a count of steps"),
        ({"gradscale": {"min_scale": -1.0, "max_scale": 2.0}}, ValueError, r"`min_scale` must lie between"),
        ({"scale": 10**400}, ValueError, r"A saved scale must lie between .*Received: scale=an integer of 1329 bits"),
        ({"scale": "4"}, TypeError, r"`scale` must be a number\. Received: scale='4' \(str\)"),
        ({"scale": True}, TypeError, r"`scale` must be a number"),
        ({"scale": None}, TypeError, r"`scale` must be a number"),
        ({"growth_factor": 10**400}, ValueError, r"`growth_factor` must be finite"),
        ({"growth_factor": torch.nan}, ValueError, r"`growth_factor` must be finite"),
        ({"backoff_factor": "0.5"}, TypeError, r"`backoff_factor` must be a number"),
        ({"growth_interval": 2.5}, TypeError, r"`growth_interval` must be an integer"),
        ({"growth_interval": 10**400}, ValueError, r"`growth_interval` must be at most 2\*\*63 - 1"),
        ({"_growth_tracker": 10**400}, ValueError, r"`_growth_tracker` must be a count of steps"),
        ({"gradscale": 7}, TypeError, r"`gradscale` of a saved GradScaler must hold a mapping\. Received: int\."),
        ({"gradscale": {"least": 1.0}}, ValueError, r"holds a policy and its state, or max_scale and min_scale\."),
        (BESIDE | {"growth_factor": 0.5}, AssertionError, r"The growth factor must be > 1\.0\."),
        (BESIDE | {"growth_interval": 0}, ValueError, r"`growth_interval` must be at least 1"),
        (BESIDE | {"_growth_tracker": "x"}, TypeError, r"`_growth_tracker` must be a number"),
        ({"gradscale": {"policy": {"kind": "Nonsense"}, "state": {}}}, ValueError, r"A saved policy has a `kind`\."),
    ],
)
def test_damaged_state_is_refused_and_nothing_is_changed(change: dict[str, Any], error: Any, text: str) -> None:
    scaler = GradScaler("cpu", init_scale=8.0, min_scale=2.0)
    before = scaler.state_dict()
    with pytest.raises(error, match=text):
        scaler.load_state_dict(before | {"scale": 4.0} | change)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("missing", KEYS)
def test_missing_entry_is_named_with_those_there_are(missing: str) -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    saved = scaler.state_dict() | {"scale": 4.0}
    del saved[missing]
    with pytest.raises(KeyError, match=missing) as caught:
        scaler.load_state_dict(saved)
    assert "A saved GradScaler has the entries scale, growth_factor" in caught.value.__notes__[0]
    assert scaler.get_scale() == 8.0


def test_state_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`load_state_dict` takes what `state_dict` returned\. Received: list\."):
        GradScaler("cpu").load_state_dict([1.0])  # type: ignore[arg-type]


def test_entries_that_are_tensors_or_of_numpy_are_loaded_as_numbers() -> None:
    scaler = GradScaler("cpu")
    saved = scaler.state_dict() | {"scale": torch.tensor(4.0), "growth_interval": np.int64(7)}
    scaler.load_state_dict(saved)
    assert scaler.state_dict() == GradScaler("cpu", init_scale=4.0, growth_interval=7).state_dict()
    assert type(scaler.state_dict()["growth_interval"]) is int


def test_scaler_loaded_before_its_first_loss_begins_with_the_saved_scale() -> None:
    """As a resumed run does: 256 before the checkpoint is 256 after it, not 65536."""
    source = GradScaler("cpu", init_scale=256.0)
    target = GradScaler("cpu")
    target.load_state_dict(source.state_dict())
    assert target.scale(torch.ones(())).item() == 256.0


def test_scale_can_be_made_without_a_loss_from_the_name_of_a_device() -> None:
    """As Accelerate does when it resumes a sharded run."""
    scaler = GradScaler("cpu", hysteresis=2)
    scaler.load_state_dict(GradScaler("cpu", init_scale=256.0).state_dict())
    scaler._lazy_init_scale_growth_tracker(scaler._device)  # type: ignore[arg-type]
    assert scaler.get_scale() == 256.0
    assert run(scaler, [True, True]) == [256.0, 128.0]


@pytest.mark.parametrize(
    ("policy", "saved"), [("auto", CheckOnly()), (CheckOnly(), "auto"), (None, CheckOnly())], ids=str
)
def test_a_state_of_another_format_is_not_loaded_and_logged(
    policy: Any, saved: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_saved, "_noted", set())
    scaler = GradScaler("cpu", policy=policy)
    before = scaler.state_dict()
    scaler.load_state_dict(GradScaler("cpu", policy=saved).state_dict())
    assert scaler.state_dict() == before
    assert "The saved state of the scaler is not loaded: it is one of" in caplog.text


def test_a_file_of_an_older_rule_is_refused_and_changes_nothing() -> None:
    scaler = GradScaler("cpu", policy="auto")
    before = scaler.state_dict()
    for saved, refused in ((HEADROOM, REFUSED_POLICY), (LOG_MAX, REFUSED_STATE)):
        with pytest.raises(ValueError, match=refused):
            scaler.load_state_dict({**before, engine_saved.KEY: engine_saved.write_text(saved)})
    assert scaler.state_dict() == before
