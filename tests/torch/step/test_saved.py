"""`state_dict` and `load_state_dict`: a run saved at any step, by any scaler, is resumed bit-exactly."""

import copy
import io
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.engine.older_states import HEADROOM, LOG_MAX, REFUSED_POLICY, REFUSED_STATE
from tests.torch.helpers import INF, loss_of, poison, same, small_model, train_step, weights
from torch import Tensor, nn

from gradscale import CheckOnly, Dynamic, NoScaling, Policy, Static, export_state, preset
from gradscale.engine.saved import write_saved
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.policies.log_max import LogMax
from gradscale.torch import LossScaler

pytestmark = pytest.mark.usefixtures("either_way")

POLICIES: dict[str, Policy] = {
    "Dynamic": Dynamic(init_scale=256.0, growth_interval=3, hysteresis=3),
    "Dynamic, odd factors": Dynamic(init_scale=300.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=2),
    "Headroom": Headroom(init_scale=2.0**30),
    "LogMax": LogMax(),
    "Histogram": Histogram(period=2),
    "Static": Static(100.0),
    "NoScaling": NoScaling(),
    "deepspeed": preset("deepspeed", scale_window=3),
}

BAD = {2, 5, 6}
"""Steps that overflow: with a hysteresis of 3, a run saved at step 3 is in the middle of its credits."""


class Run:
    """A model in training, with everything it takes to continue."""

    def __init__(self, policy: Policy) -> None:
        self.model = small_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.scaler = LossScaler(self.model, policy)
        self.scales: list[float] = []

    def train(self, steps: range) -> list[Tensor]:
        for step in steps:
            bad = INF if step in BAD and not isinstance(self.scaler.policy, NoScaling) else None
            result = train_step(self.scaler, self.model, self.optimizer, step, bad=bad, clip_norm=0.5)
            self.scales.append(result.next_scale.item())
        return weights(self.model)

    def load(self, other: "Run", saved: Mapping[str, Any], system: str | None = None) -> None:
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        self.scaler.load_state_dict(saved, system)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("saved_at", [0, 1, 3, 6, 7])
def test_a_run_saved_at_any_step_is_resumed_bit_exactly(name: str, saved_at: int) -> None:
    run, resumed = Run(POLICIES[name]), Run(Dynamic())
    run.train(range(saved_at))
    resumed.load(run, json.loads(json.dumps(run.scaler.state_dict())))
    run.scales.clear()
    assert same(run.train(range(saved_at, 10)), resumed.train(range(saved_at, 10)))
    assert run.scales == resumed.scales
    assert run.scaler.state_dict() == resumed.scaler.state_dict()


@pytest.mark.parametrize("saved_at", [0, 3])
def test_loading_into_a_scaler_that_has_already_worked_gives_the_same_run(saved_at: int) -> None:
    run, used = Run(POLICIES["Dynamic"]), Run(Headroom())
    run.train(range(saved_at))
    used.train(range(5))
    used.scales.clear()
    used.load(run, run.scaler.state_dict())
    run.scales.clear()
    assert same(run.train(range(saved_at, 10)), used.train(range(saved_at, 10)))
    assert run.scales == used.scales


def torch_run(scaler: Any, steps: range, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Trains with torch's own scaler."""
    scales = []
    for step in steps:
        scaler.scale(loss_of(model, step)).backward()
        if step in BAD:
            poison(next(model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("saved_at", [0, 1, 3, 6])
@pytest.mark.parametrize("factors", [(2.0, 0.5), (1.7, 0.3)])
def test_a_run_of_torchs_own_scaler_is_continued_as_torch_would(saved_at: int, factors: tuple[float, float]) -> None:
    growth, backoff = factors
    model, ours = small_model(), Run(Dynamic())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=300.0, growth_factor=growth, backoff_factor=backoff, growth_interval=2
    )
    torch_run(theirs, range(saved_at), model, optimizer)
    ours.model.load_state_dict(model.state_dict())
    ours.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ours.scaler.load_state_dict(theirs.state_dict())
    expected = torch_run(theirs, range(saved_at, 10), model, optimizer)
    for step in range(saved_at, 10):
        result = train_step(ours.scaler, ours.model, ours.optimizer, step, bad=INF if step in BAD else None)
        ours.scales.append(result.next_scale.item())
    assert ours.scales == expected
    assert same(weights(ours.model), weights(model)) or growth != 2.0


@pytest.mark.parametrize(
    ("system", "config"),
    [
        ("torch", {"growth_interval": 3}),
        ("deepspeed", {"scale_window": 3, "delayed_shift": 2}),
        ("megatron", {}),  # saves no settings
        ("paddle", {"incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 2}),
    ],
)
def test_another_systems_state_is_read_and_goes_on_by_its_rule(system: str, config: dict[str, Any]) -> None:
    policy = preset(system, **config)
    run, resumed = Run(policy), Run(Dynamic())
    run.train(range(4))
    state = run.scaler._rule.state
    resumed.load(run, export_state(system, policy, state), system)
    run.scales.clear()
    run.train(range(4, 10))
    resumed.train(range(4, 10))
    assert run.scales == resumed.scales


def test_the_bytes_of_another_systems_file_are_read() -> None:
    policy = preset("deepspeed", scale_window=3)
    file = io.BytesIO()
    torch.save({"optimizer": export_state("deepspeed", policy, policy.start()) | {"weight": torch.ones(2)}}, file)
    scaler = LossScaler(policy=Dynamic())
    scaler.load_state_dict(file.getvalue(), system="deepspeed")
    assert scaler.loss_scale.item() == 2.0**16
    assert scaler.policy == policy


def test_bytes_without_a_system_are_refused() -> None:
    with pytest.raises(TypeError, match=r"takes what `state_dict` returned. Received: bytes"):
        LossScaler(policy=Dynamic()).load_state_dict(b"scale")


def test_loading_keeps_the_device() -> None:
    scaler = LossScaler(policy=Dynamic(), device="meta")
    scaler.load_state_dict(LossScaler(policy=Static(8.0)).state_dict())
    assert scaler.loss_scale.device.type == "meta"


def test_loading_forgets_a_step_that_was_begun_and_refuses_its_gradients() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler(model, Dynamic(init_scale=64.0))
    saved = scaler.state_dict()
    train_step(scaler, model, optimizer)
    scaler.backward(loss_of(model))
    scaler.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="none was scaled since the last step"):
        scaler.step(optimizer)
    scaler.backward(loss_of(model))
    with pytest.raises(RuntimeError, match="Gradients from before the last step are still there"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    assert not train_step(scaler, model, optimizer).skipped()


def test_a_checkpoint_goes_through_torch_save_without_code(tmp_path: Any) -> None:
    run = Run(POLICIES["Headroom"])
    run.train(range(4))
    torch.save(run.scaler.state_dict(), tmp_path / "scaler.pt")
    assert torch.load(tmp_path / "scaler.pt", weights_only=True) == run.scaler.state_dict()


def damaged(**changes: Any) -> dict[str, Any]:
    saved = write_saved(Dynamic(), Dynamic().start())
    return {"policy": saved["policy"], "state": {**saved["state"], **changes}}


@pytest.mark.parametrize(
    ("saved", "error", "text"),
    [
        ({}, ValueError, r"has the keys \['policy', 'state'\]\. Received: \[\].*`gradscale.import_state`"),
        ({"scale": 1.0}, ValueError, r"Received: \['scale'\]"),
        (
            {"gradscale": "[" * 10_000},
            ValueError,
            r"`gradscale` of a saved scaler is JSON\. Received: '\[+\.\.\.\[+'\.",
        ),
        ({"gradscale": "[1]"}, TypeError, r"takes what `state_dict` returned\. Received: list\."),
        ([], TypeError, r"`load_state_dict` takes what `state_dict` returned\. Received: list\."),
        ({"policy": {"kind": "Magic"}, "state": {}}, ValueError, r"kind='Magic'\. Known: .*Dynamic"),
        ({"policy": [], "state": {}}, TypeError, r"`policy` of a saved LossScaler must be a mapping\. Received: \[\]"),
        (damaged(scale=[1.0, 2.0]), ValueError, r"one scale, not a vector of them\. Received: vectors in \['scale'\]"),
        (damaged(scale=float("nan")), ValueError, r"`ScaleState\.scale` must not be NaN"),
        (damaged(applied=-1), ValueError, r"`ScaleState\.applied` must not be negative"),
        (damaged(scale=0.0), ValueError, r"between the policy's bounds, 1\.0 and .* Received: scale=0\.0\."),
        (damaged(scale="inf"), ValueError, r"between the policy's bounds.*Received: scale=inf\."),
    ],
)
def test_what_is_no_saved_scaler_is_refused_and_nothing_changes(saved: Any, error: type[Exception], text: str) -> None:
    scaler = LossScaler(policy=Static(8.0))
    before = scaler.state_dict()
    with pytest.raises(error, match=text):
        scaler.load_state_dict(saved)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("system", [None, "torch"])
@pytest.mark.parametrize("scale", [0.0, 2.0**-129, 2.0**-127, 2.0**127])
def test_a_state_of_torch_whose_scale_no_gradient_can_be_divided_by_is_refused(
    scale: float, system: str | None
) -> None:
    """On a device that flushes subnormal numbers, 2**-127 is 0, and so is the reciprocal of 2**127."""
    scaler = LossScaler(policy=Dynamic(init_scale=8.0))
    before = scaler.state_dict()
    saved = export_state("torch", Dynamic(), Dynamic().start()) | {"scale": scale}
    with pytest.raises(ValueError, match=r"between 2\*\*-126 and 2\*\*126, .* Received: scale="):
        scaler.load_state_dict(saved, system)
    assert scaler.state_dict() == before


@pytest.mark.parametrize(("policy", "saved"), [("auto", CheckOnly()), (CheckOnly(), "auto")], ids=str)
def test_a_state_of_another_format_is_not_loaded(policy: Any, saved: Any) -> None:
    scaler = LossScaler(policy=policy)
    before = scaler.state_dict()
    scaler.load_state_dict(LossScaler(policy=saved).state_dict())
    assert scaler.state_dict() == before


def test_a_file_of_an_older_rule_is_refused_and_changes_nothing() -> None:
    scaler = LossScaler(small_model())
    before = scaler.state_dict()
    for saved, refused in ((HEADROOM, REFUSED_POLICY), (LOG_MAX, REFUSED_STATE)):
        with pytest.raises(ValueError, match=refused):
            scaler.load_state_dict(saved)
    assert scaler.state_dict() == before
