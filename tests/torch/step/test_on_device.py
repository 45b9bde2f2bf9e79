"""Fused optimizers on an accelerator: the rule runs there, with the states and weights that the host's rule gives."""

import copy
import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.torch.helpers import INF, NAN, OPTIMIZERS, loss_of, poison, small_model
from tests.torch.sim import host
from torch import nn

from gradscale import CheckOnly, Dynamic, Headroom, Histogram, LogMax, Policy, Static
from gradscale.kernels.triton import operator
from gradscale.peers.torch_rule import TorchRule
from gradscale.torch import GradScaler, LossScaler
from gradscale.torch.step import on_device

pytestmark = pytest.mark.simulated_only

POLICIES = [
    Headroom(),
    Dynamic(init_scale=300.0, growth_interval=3, growth_factor=1.7, backoff_factor=0.3, min_scale=2.0**-10),
    LogMax(),
    Histogram(period=2),
    Static(4.0),
    CheckOnly(),
]

STEPS = 40
OVERFLOWS, BAD_LOSSES = {0, 5, 6, 7, 20, 33}, {9, 21}


class Run:
    """A small model, and the state of its scaler after every step."""

    def __init__(self, policy: Policy, **arguments: Any) -> None:
        self.model = small_model()
        self.optimizer = OPTIMIZERS["adamw fused"](self.model.parameters())
        self.scaler = LossScaler(self.model, policy, on_stuck="ignore")
        self.arguments = arguments

    def step(self, number: int) -> Any:
        loss = loss_of(self.model, number)
        self.scaler.backward(loss * NAN if number in BAD_LOSSES else loss)
        if number in OVERFLOWS:
            poison(next(self.model.parameters()), INF)
        result = self.scaler.step(self.optimizer, **self.arguments)
        self.optimizer.zero_grad()
        return result

    @property
    def weights(self) -> list[torch.Tensor]:
        return [each.detach().cpu() for each in self.model.parameters()]

    @property
    def runs_on_device(self) -> bool:
        return self.scaler._rule.ahead is not None


def same(one: Run, other: Run) -> bool:
    states = [run.scaler.state_dict() for run in (one, other)]
    return states[0] == states[1] and all(map(torch.equal, one.weights, other.weights))


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Returns a function that makes a run whose rule the host runs."""

    def made(policy: Policy, **arguments: Any) -> Run:
        run = Run(policy, **arguments)
        step = run.step

        def stepped(number: int) -> Any:
            with monkeypatch.context() as patched:
                patched.setattr(on_device, "refusal", lambda policy, device: "no kernel")
                return step(number)

        run.step = stepped  # type: ignore[method-assign]
        return run

    return made


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_device_gives_the_states_and_weights_of_the_host(policy: Policy, on_host: Callable[..., Run]) -> None:
    ours, theirs = Run(policy), on_host(policy)
    for number in range(STEPS):
        results = ours.step(number), theirs.step(number)
        if number % 4 == 3:
            assert [each.skipped() for each in results] == [number in OVERFLOWS | BAD_LOSSES] * 2
            assert results[0].status() == results[1].status()
            assert results[0].next_scale == results[1].next_scale
            names = [[each.name for each in result.culprits()] for result in results]
            assert names[0] == names[1]
    assert ours.runs_on_device
    assert not theirs.runs_on_device
    assert same(ours, theirs)


class DropInRun(Run):
    """The same with the drop-in: with torch's calls `in_torchs_order`, or with the two that it needs."""

    def __init__(self, policy: Policy, **arguments: Any) -> None:
        super().__init__(policy)
        self.scaler = GradScaler("sim", policy=policy, on_stuck="ignore")  # type: ignore[assignment]
        self.in_torchs_order = arguments.pop("in_torchs_order", False)
        self.arguments = arguments

    def step(self, number: int) -> Any:
        scaler: Any = self.scaler
        loss = loss_of(self.model, number)
        scaler.scale(loss * NAN if number in BAD_LOSSES else loss).backward()
        if number in OVERFLOWS | BAD_LOSSES:
            poison(next(self.model.parameters()), INF)
        if self.in_torchs_order:
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        scaler.step(self.optimizer, **self.arguments)
        scaler.update()
        self.optimizer.zero_grad()
        return scaler.last


WAYS = {"step": {}, "clipped": {"clip_norm": 0.5}, "torch's calls": {"in_torchs_order": True}}
DROP_IN_POLICIES = [Headroom(), Histogram(period=2), CheckOnly(), TorchRule(init_scale=64.0, growth_interval=3)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", DROP_IN_POLICIES, ids=repr)
def test_the_drop_in_on_the_device_gives_the_scales_of_the_host(
    policy: Policy, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = DropInRun(policy, **WAYS[way]), DropInRun(policy, **WAYS[way])
    for number in range(STEPS):
        ours.step(number)
        with monkeypatch.context() as patched:
            patched.setattr(on_device, "refusal", lambda policy, device: "no kernel")
            theirs.step(number)
    assert ours.runs_on_device
    assert not theirs.runs_on_device
    states = [run.scaler._rule.state for run in (ours, theirs)]
    assert states[0].scale == states[1].scale
    assert (states[0].applied, states[0].skipped) == (states[1].applied, states[1].skipped)
    assert states[0].skipped == len(OVERFLOWS | BAD_LOSSES)
    for one, other in zip(ours.weights, theirs.weights, strict=True):
        assert torch.allclose(one, other, rtol=1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", DROP_IN_POLICIES, ids=repr)
def test_no_step_of_the_drop_in_reads_on_the_host(policy: Policy, way: str) -> None:
    run = DropInRun(policy, **WAYS[way])
    with host.busy(), host.waits() as waits:
        for number in range(STEPS):
            run.step(number)
            run.scaler.metrics()
    assert waits == host.Waits()
    assert run.scaler._rule.steps == STEPS


def test_two_optimizers_of_the_drop_in_are_one_step_of_the_rule() -> None:
    model, scaler = small_model(), GradScaler("sim", policy=Headroom(), on_stuck="ignore")
    halves = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizers = [torch.optim.AdamW(half, fused=True) for half in halves]
    with host.busy(), host.waits() as waits:
        for number in range(8):
            for optimizer in optimizers:  # each with a loss of its own, as a GAN has
                scaler.scale(loss_of(model, number)).backward()
                if optimizer is optimizers[1] and number in OVERFLOWS:
                    poison(halves[1][0], INF)
                scaler.step(optimizer)
                model.zero_grad()
            scaler.update()
    assert waits == host.Waits()
    state = scaler._rule.state
    assert (int(state.applied), int(state.skipped)) == (4, 4)


def test_the_share_of_two_optimizers_of_the_drop_in_is_that_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for on_host in (False, True):
        if on_host:
            monkeypatch.setattr(on_device, "refusal", lambda policy, device: "no kernel")
        model, scaler = small_model(), GradScaler("sim", policy=Histogram(period=2), on_stuck="ignore")
        halves = list(model.parameters())[:2], list(model.parameters())[2:]
        optimizers = [torch.optim.AdamW(half, fused=True) for half in halves]
        for number in range(8):
            scaler.scale(loss_of(model, number)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
        found.append(scaler.state_dict())
    assert found[0] == found[1]


def test_a_second_update_of_the_drop_in_decides_anew() -> None:
    model, scaler = small_model(), GradScaler("sim", init_scale=64.0, on_stuck="ignore")
    halves = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizers = [torch.optim.AdamW(half, fused=True) for half in halves]
    for number in range(3):
        scaler.scale(loss_of(model, 1)).backward()
        if number == 1:
            poison(halves[1][0], INF)
        for optimizer in optimizers:
            scaler.step(optimizer)
            scaler.update()
        model.zero_grad()
    state = scaler._rule.state
    assert scaler._rule.ahead is not None
    assert (float(state.scale), int(state.applied), int(state.skipped)) == (32.0, 2, 1)


def test_a_second_update_keeps_the_outcomes_of_the_steps_before_it() -> None:
    model, scaler = small_model(), GradScaler("sim", init_scale=64.0, on_stuck="ignore")
    halves = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizers = [torch.optim.AdamW(half, fused=True) for half in halves]
    results = []
    with host.busy():
        for number in range(3):
            scaler.scale(loss_of(model, 1)).backward()
            poison(halves[0][0], INF)
            for optimizer in optimizers[: number or 1]:
                scaler.step(optimizer)
                scaler.update()
            results.append(scaler.last)
            model.zero_grad()
    assert [float(result.next_scale) for result in results] == [32.0, 16.0, 8.0]


@pytest.mark.parametrize("kind", [Run, DropInRun])
def test_a_state_that_is_loaded_leaves_the_outcome_of_the_last_step(kind: type[Run]) -> None:
    run = kind(Dynamic(init_scale=64.0))
    run.step(1)
    saved = run.scaler.state_dict()
    result = run.step(5)
    run.scaler.load_state_dict(saved)
    assert float(result.next_scale) == 32.0
    assert run.scaler.metrics()["scale"] == 64.0


def test_a_number_of_the_rule_that_is_set_before_the_update_counts() -> None:
    run = DropInRun(TorchRule(init_scale=64.0))
    run.step(1)
    run.scaler.scale(loss_of(run.model, 2)).backward()
    run.scaler.step(run.optimizer)
    run.scaler.set_growth_interval(2)  # type: ignore[attr-defined]
    run.scaler.update()  # type: ignore[attr-defined]
    assert run.runs_on_device
    assert run.scaler.get_scale() == 128.0  # type: ignore[attr-defined]


def test_a_shallow_copy_of_the_drop_in_follows_no_step_of_the_original() -> None:
    run = DropInRun(TorchRule(init_scale=64.0))
    run.step(1)
    other = copy.copy(run.scaler)
    with host.busy():
        run.step(5)
        assert other._rule.state.scale == 64.0
    assert run.scaler._rule.state.scale == 32.0


@pytest.mark.parametrize("kind", [Run, DropInRun])
def test_a_loss_of_inference_mode_may_come_first(kind: type[Run]) -> None:
    run = kind(Headroom())
    run.step(1)
    with torch.inference_mode():
        run.scaler.scale(loss_of(run.model, 2))
    run.step(2)
    assert run.scaler._rule.state.applied == 2


def test_a_step_in_the_backward_pass_counts_its_share_as_the_host_does(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for on_host in (False, True):
        if on_host:
            monkeypatch.setattr(on_device, "refusal", lambda policy, device: "no kernel")
        run = Run(Histogram(period=2))
        optimizers = [torch.optim.SGD([each], lr=0.01, fused=True) for each in run.model.parameters()]
        run.scaler.step_in_backward(*optimizers)
        for number in range(12):
            run.scaler.backward(loss_of(run.model, number) * (INF if number == 5 else 1.0))
        assert run.runs_on_device is not on_host
        found.append((run.scaler.state_dict(), run.weights))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_clipped_step_gives_the_scales_of_the_host(policy: Policy, on_host: Callable[..., Run]) -> None:
    ours, theirs = Run(policy, clip_norm=0.5), on_host(policy, clip_norm=0.5)
    for number in range(STEPS):
        results = ours.step(number), theirs.step(number)
        norms = [float(result.grad_norm) for result in results]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert ours.runs_on_device
    states = [run.scaler._rule.state for run in (ours, theirs)]
    assert states[0].scale == states[1].scale
    assert (states[0].applied, states[0].skipped) == (states[1].applied, states[1].skipped)
    assert torch.allclose(
        torch.cat([each.reshape(-1) for each in ours.weights]),
        torch.cat([each.reshape(-1) for each in theirs.weights]),
        rtol=1e-4,
    )


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_no_step_reads_on_the_host(policy: Policy, clip_norm: float | None) -> None:
    run = Run(policy, clip_norm=clip_norm)
    with host.busy(), host.waits() as waits:
        for number in range(STEPS):
            run.step(number)
    assert waits == host.Waits()
    assert run.scaler._rule.steps == STEPS


def test_metrics_and_results_arrive_without_a_read() -> None:
    run = Run(Headroom())
    with host.waits() as waits:
        result = run.step(1)
        assert result.poll() is True
        assert run.scaler.metrics()["applied"] == 1.0
    assert waits == host.Waits()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))], ids=["copy", "pickle"])
def test_a_copy_goes_on_as_the_original(copied: Callable[[Any], Any]) -> None:
    run = Run(Headroom())
    for number in range(8):
        run.step(number)
    other = copied(run)
    for number in range(8, 16):
        run.step(number)
        other.step(number)
    assert not other.runs_on_device  # torch's copy of an optimizer does not say any more that its kernel divides
    assert same(run, other)


def test_a_saved_state_goes_on_as_the_original() -> None:
    run, other = Run(Headroom()), Run(Headroom())
    for number in range(8):
        run.step(number)
    other.model.load_state_dict(run.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    other.scaler.load_state_dict(run.scaler.state_dict())
    for number in range(8, 16):
        run.step(number)
        other.step(number)
    assert same(run, other)


def test_edits_between_steps_of_the_device_are_seen(on_host: Callable[..., Run]) -> None:
    ours, theirs = Run(Headroom()), on_host(Headroom())
    for number in range(24):
        for run in (ours, theirs):
            if number % 5 != 4:
                run.step(number)
                continue
            run.scaler.backward(loss_of(run.model, number), retries=2 * (number % 2))
            with run.scaler.unscaled(run.optimizer):
                pass
            run.scaler.step(run.optimizer)
            run.optimizer.zero_grad()
    assert same(ours, theirs)


def test_a_state_with_a_wider_number_stays_on_the_host() -> None:
    run = Run(Headroom())
    run.scaler._rule.state = replace(run.scaler._rule.state, peak=np.float64(0.1))
    run.step(1)
    assert not run.runs_on_device


def test_gradients_on_two_devices_are_for_the_host() -> None:
    there, here = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="cpu"))
    optimizers = [torch.optim.SGD([weight], lr=0.5, fused=True) for weight in (there, here)]
    scaler = LossScaler(policy=Dynamic(init_scale=8.0))
    scaler.backward(there.sum() + here.to("sim").sum())
    scaler.step(*optimizers)
    assert scaler._rule.ahead is None
    assert (there.tolist(), here.tolist()) == ([0.5] * 3, [0.5] * 3)


class Halving(Static):
    """A rule of a user: an overflow halves the scale, and nothing raises it."""

    is_compiled: ClassVar[bool] = True

    def next(self, state: Any, seen: Any, xp: Any) -> Any:
        overflow = xp.logical_not(seen.finite)
        after = super().next(state, seen, xp)
        return replace(after, scale=xp.where(overflow, state.scale * 0.5, state.scale))


def test_a_rule_of_a_user_runs_on_the_device_if_it_says_that_it_can_be_traced() -> None:
    run = Run(Halving(4.0))
    for number in range(8):
        run.step(number)
    assert run.runs_on_device
    assert run.scaler._rule.state.scale == np.float32(0.25)  # 0, 5, 6, 7


class Branching(Static):
    """Says that it can be traced, and cannot."""

    is_compiled: ClassVar[bool] = True

    def next(self, state: Any, seen: Any, xp: Any) -> Any:
        return super().next(state, seen, xp) if seen.finite else state


class Untraced(Headroom):
    """Does not say so."""


def broken(*arguments: Any) -> Any:
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nand more")


REASONS = {
    "of a user": (Untraced(), "`Untraced` does not have `is_compiled = True`."),
    "no compiler": (Headroom(), "RuntimeError: Failed to find C compiler. Please specify via CC environment variable."),
}


@pytest.mark.parametrize("name", REASONS)
def test_where_there_is_no_kernel_the_host_runs_the_rule_and_says_why_once(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy, reason = REASONS[name]
    if name == "no compiler":
        monkeypatch.setattr(operator, "advance", broken)
    run, plain = Run(policy), Run(Headroom())
    with caplog.at_level(logging.INFO, on_device.__name__):
        for number in range(8):
            run.step(number)
    assert not run.runs_on_device
    assert caplog.messages == [f"The rule of the scale runs on the host, not on sim:0: {reason}"]
    monkeypatch.undo()
    for number in range(8):
        plain.step(number)
    assert plain.runs_on_device
    assert run.scaler._rule.state == plain.scaler._rule.state
