"""Distributed checkpoints: a scaler is one value, and loads on any number of ranks, whatever it was built with."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from tests.torch.helpers import INF, loss_of, poison, same, small_model, weights
from tests.torch.ranks.launch import run_ranks
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from gradscale import Dynamic, Headroom, Histogram, NoScaling, Policy
from gradscale.engine import saved as engine_saved
from gradscale.torch import GradScaler, LossScaler, MasterWeights

dcp: Any = torch.distributed.checkpoint  # whose names are not in its `__all__`

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

SAVED: list[Policy] = [Dynamic(init_scale=2.0**10, hysteresis=3), Headroom()]
BUILT: list[Policy] = [Dynamic(), Histogram(), NoScaling()]
SETTINGS: list[dict[str, Any]] = [{"hysteresis": 2}, {"policy": Headroom()}, {"min_scale": 2.0}]
NAMES = ["hysteresis", "headroom", "bounds"]


def trained(policy: Policy, group: Any = None) -> LossScaler:
    """Returns a scaler after 18 steps: one is skipped, and one estimates amax from the norm."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = LossScaler(model, policy, group=group)
    for step in range(18):
        scaler.backward(loss_of(model, step))
        if step == 1:
            poison(next(model.parameters()), INF)
        scaler.step(optimizer, clip_norm=0.5)
        optimizer.zero_grad()
    return scaler


def trained_drop_in(settings: dict[str, Any]) -> GradScaler:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", **settings)
    for step in range(3):
        scaler.scale(loss_of(model, step)).backward()
        if step == 1:
            poison(next(model.parameters()), INF)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler


def loaded(saved: Path, scaler: Any, **how: Any) -> dict[str, Any]:
    dcp.load({"scaler": scaler}, checkpoint_id=saved, **how)
    return scaler.state_dict()


def save_and_load(folder: Path) -> dict[int, list[tuple[Any, Any]]]:
    """Saves on two ranks of four, and loads on one, two and four. Returns what was loaded, and what was saved."""
    rank = dist.get_rank()
    groups: dict[int, Any] = {ranks: dist.new_group(list(range(ranks))) for ranks in (1, 2, 4)}
    found: dict[int, list[tuple[Any, Any]]] = {ranks: [] for ranks in groups}
    built = [partial(LossScaler, policy=policy) for policy in BUILT]
    drop_ins = [partial(GradScaler, "cpu", **settings) for settings in SETTINGS]
    makers: list[tuple[Callable[[], Any], Sequence[Callable[[], Any]]]] = [
        *((partial(trained, policy, groups[2]), built) for policy in SAVED),
        *((partial(trained_drop_in, settings), drop_ins) for settings in SETTINGS),
    ]
    for number, (make, builders) in enumerate(makers):
        checkpoint = folder / str(number)
        saved: list[Any] = [None]
        if rank < 2:
            scaler = make()
            saved = [scaler.state_dict()]
            dcp.save({"scaler": scaler}, checkpoint_id=checkpoint, process_group=groups[2])
        dist.broadcast_object_list(saved)
        for ranks, group in groups.items():
            for build in builders if rank < ranks else ():
                found[ranks].append((loaded(checkpoint, build(), process_group=group), saved[0]))
    return found


@pytest.fixture(scope="module")
def by_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(4, save_and_load, folder / "checkpoints", folder=folder / "ranks")


@pytest.mark.cpu_only("gloo")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_two_ranks_saved_is_loaded_whatever_the_policy(by_four_ranks: list[dict[int, Any]], ranks: int) -> None:
    for found in by_four_ranks[:ranks]:
        assert len(found[ranks]) == len(SAVED) * len(BUILT) + len(SETTINGS) ** 2
        for state, expected in found[ranks]:
            assert state == expected


@pytest.fixture(params=SETTINGS, ids=NAMES)
def drop_in(request: pytest.FixtureRequest) -> GradScaler:
    return trained_drop_in(request.param)


@pytest.mark.parametrize("built", SETTINGS, ids=NAMES)
def test_a_drop_in_loads_what_another_saved_whatever_its_settings(
    drop_in: GradScaler, built: dict[str, Any], tmp_path: Path
) -> None:
    dcp.save({"scaler": drop_in}, checkpoint_id=tmp_path)
    expected = GradScaler("cpu", **built)
    expected.load_state_dict(drop_in.state_dict())
    assert loaded(tmp_path, GradScaler("cpu", **built)) == expected.state_dict()
    assert expected.state_dict()["gradscale"] == drop_in.state_dict()["gradscale"]


def test_a_default_drop_in_saves_and_loads_what_torch_does(tmp_path: Path) -> None:
    """DCP loads only the entries that the loading scaler has: torch's five, whatever was saved."""
    source = trained_drop_in({"policy": Headroom()})
    dcp.save({"scaler": source}, checkpoint_id=tmp_path)
    found = loaded(tmp_path, GradScaler("cpu"))
    assert found == loaded(tmp_path, torch.amp.GradScaler("cpu"))
    assert found["scale"] == source.get_scale()


def test_torch_loads_the_checkpoint_of_a_drop_in(drop_in: GradScaler, tmp_path: Path) -> None:
    dcp.save({"scaler": drop_in}, checkpoint_id=tmp_path)
    state = loaded(tmp_path, torch.amp.GradScaler("cpu"))
    assert state == {key: value for key, value in drop_in.state_dict().items() if key != "gradscale"}


def test_a_drop_in_loads_torchs_checkpoint_as_a_part(tmp_path: Path) -> None:
    dcp.save({"scaler": torch.amp.GradScaler("cpu", init_scale=8.0)}, checkpoint_id=tmp_path)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    state = loaded(tmp_path, GradScaler("cpu", policy=Headroom()), planner=planner)
    assert (state["scale"], "Headroom" in state["gradscale"]) == (8.0, True)


def test_a_scaler_is_one_value_of_the_checkpoint(tmp_path: Path) -> None:
    dcp.save({"scaler": trained(Headroom()), "step": 18}, checkpoint_id=tmp_path)
    assert set(dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata) == {"scaler.gradscale", "step"}


@pytest.fixture
def nothing_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_saved, "_noted", set())


@pytest.mark.usefixtures("nothing_noted")
@pytest.mark.parametrize(
    ("saved", "built", "text"),
    [
        (LossScaler(policy=Dynamic()), LossScaler(policy=Headroom()), r"Dynamic(), not Headroom()."),
        (GradScaler("cpu", policy=Headroom()), GradScaler("cpu"), "Headroom(), not torch's own rule."),
    ],
)
def test_a_policy_that_is_replaced_is_logged_once(
    saved: Any, built: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = built.state_dict()
    built.load_state_dict(saved.state_dict())
    built.load_state_dict(saved.state_dict())
    built.load_state_dict(before)
    built.load_state_dict(saved.state_dict())
    assert [(record.name, record.levelno) for record in caplog.records][:1] == [
        ("gradscale.engine.saved", logging.WARNING)
    ]
    assert [text in message for message in caplog.messages].count(True) == 1


@pytest.mark.usefixtures("nothing_noted")
def test_the_same_policy_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    LossScaler(policy=Dynamic()).load_state_dict(LossScaler(policy=Dynamic()).state_dict())
    GradScaler("cpu").load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    assert caplog.messages == []


@pytest.mark.parametrize("masters", [False, True])
def test_the_step_that_dcp_makes_to_fill_an_optimizer_moves_nothing(masters: bool) -> None:
    """`get_optimizer_state_dict` steps an empty optimizer on zeros, with a learning rate of 0, to have its state."""
    model = small_model().half() if masters else small_model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    optimizer: Any = MasterWeights(inner) if masters else inner
    scaler = LossScaler(model, Dynamic(init_scale=256.0))
    before, state = weights(model), scaler.state_dict()
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    assert same(before, weights(model))
    assert (scaler.state_dict(), scaler.last) == (state, None)
    x = torch.ones(8, 4, dtype=before[0].dtype)
    scaler.backward(model(x).float().square().mean())
    assert scaler.step(optimizer).applied
