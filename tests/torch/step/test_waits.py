"""On a device the host waits for nothing in an ordinary step, from the first one on: no read and no blocking upload."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.torch.helpers import INF, OPTIMIZERS, loss_of, poison, small_model
from tests.torch.sim import host
from torch import nn

from gradscale import Dynamic, Headroom, Histogram, LogMax, NoScaling, Policy, Static
from gradscale.engine.culprits import Culprit
from gradscale.engine.health import ScaleStuck
from gradscale.engine.metrics import METRICS
from gradscale.kernels.torch import largest
from gradscale.torch import GradScaler, LossScaler, MasterWeights
from gradscale.torch.step import measure

pytestmark = pytest.mark.simulated_only

Optimizer = torch.optim.Optimizer
Step = Callable[[nn.Module, Optimizer, int], Any]

FUSED = [name for name in OPTIMIZERS if "fused" in name]
POLICIES = [Dynamic(), Static(4.0), Headroom(), LogMax(), Histogram(), Dynamic(hysteresis=2, refill="clean")]
STEPS = 3


def loop(step: Step, model: nn.Module, optimizer: Optimizer) -> host.Waits:
    """Returns the waits of a few steps, of which the second overflows. The forward pass is not the scaler's."""
    found = host.Waits()
    for number in range(STEPS):
        with host.waits() as waits:
            step(model, optimizer, number)
        found.reads += waits.reads
        found.uploads += waits.uploads
        optimizer.zero_grad()
    return found


def with_loss_scaler(policy: Policy, micro_batches: int = 1, max_skips: int = 50, **arguments: Any) -> Step:
    scaler: LossScaler | None = None

    def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        nonlocal scaler
        if scaler is None:
            scaler = LossScaler(model, policy, max_consecutive_skips=max_skips)
            scaler.protect_buffers()
        for seed in range(micro_batches):
            scaler.backward(_loss(model, seed))
        if number == 1:
            poison(next(model.parameters()), INF)
        scaler.step(optimizer, **arguments)
        scaler.metrics()

    return step


def _loss(model: nn.Module, seed: int) -> torch.Tensor:
    """Returns a loss whose batch is put on the device without a wait of the host that is counted."""
    x = torch.linspace(-1.0, 1.0, 16, device="sim").reshape(4, 4) * (seed + 1)
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("arguments", [{}, {"clip_norm": 1.0}, {"clip_value": 1.0}, {"norm": True}], ids=str)
def test_a_step_with_a_fused_optimizer_waits_for_nothing(name: str, arguments: dict[str, Any]) -> None:
    model = small_model()
    waits = loop(with_loss_scaler(Dynamic(), **arguments), model, OPTIMIZERS[name](model.parameters()))
    assert waits == host.Waits()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_no_policy_waits_for_anything(policy: Policy) -> None:
    model = small_model()
    waits = loop(with_loss_scaler(policy, clip_norm=1.0), model, OPTIMIZERS["adamw fused"](model.parameters()))
    assert waits == host.Waits()


def test_an_accumulated_step_waits_for_nothing() -> None:
    model = small_model()
    step = with_loss_scaler(Dynamic(), micro_batches=3, clip_norm=1.0)
    assert loop(step, model, OPTIMIZERS["adamw fused"](model.parameters())) == host.Waits()


@pytest.mark.parametrize("arguments", [{}, {"clip_norm": 1.0}, {"clip_value": 1.0}], ids=str)
def test_a_step_with_any_other_optimizer_reads_one_flag(arguments: dict[str, Any]) -> None:
    model = small_model()
    waits = loop(with_loss_scaler(Dynamic(), **arguments), model, OPTIMIZERS["sgd foreach"](model.parameters()))
    assert len(waits.reads) == STEPS
    assert waits.uploads == []


@pytest.mark.parametrize("arguments", [{}, {"clip_norm": 1.0}, {"clip_value": 1.0}], ids=str)
@pytest.mark.parametrize("name", ["sgd foreach", "adamw fused"])
def test_a_step_without_scaling_waits_for_nothing(name: str, arguments: dict[str, Any]) -> None:
    model = small_model()
    waits = loop(with_loss_scaler(NoScaling(), **arguments), model, OPTIMIZERS[name](model.parameters()))
    assert waits == host.Waits()


@pytest.mark.parametrize(("slope", "attempts"), [(2.0**-4, 1), (2.0**3, 5)])
def test_a_backward_pass_with_retries_reads_once_per_attempt(slope: float, attempts: int) -> None:
    """The scale starts at 2**16. With a slope of 2**3, the gradient is finite in FP16 from a scale of 2**12 on."""
    weight = nn.Parameter(torch.ones(()))
    scaler = LossScaler(nn.ParameterList([weight]), Dynamic(init_scale=2.0**16))
    loss = weight.half().float() * slope
    with host.waits() as waits:
        scaler.backward(loss, retries=10)
    assert (len(waits.reads), len(waits.uploads)) == (attempts, 0)


@pytest.mark.parametrize("storage", ["fp32", "remainder", "kahan", "stochastic"])
@pytest.mark.parametrize("arguments", [{}, {"clip_norm": 1.0}], ids=str)
def test_a_step_with_master_weights_around_a_fused_optimizer_waits_for_nothing(
    storage: Any, arguments: dict[str, Any]
) -> None:
    model = small_model().to(torch.bfloat16)
    optimizer = MasterWeights(torch.optim.AdamW(model.parameters(), fused=True), storage)
    assert loop(with_loss_scaler(Dynamic(), **arguments), model, optimizer) == host.Waits()


@pytest.mark.parametrize("policy", [None, *POLICIES], ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("clip", [False, True])
def test_a_fused_step_of_the_drop_in_waits_for_nothing(policy: Policy | None, clip: bool) -> None:
    model = small_model()
    scaler = GradScaler("sim", policy=policy)

    def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        scaler.scale(_loss(model, 0)).backward()
        if number == 1:
            poison(next(model.parameters()), INF)
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    assert loop(step, model, OPTIMIZERS["adamw fused"](model.parameters())) == host.Waits()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_saved_state_is_loaded_without_a_wait(policy: Policy) -> None:
    model = small_model()
    optimizer = OPTIMIZERS["sgd fused"](model.parameters())
    scaler = LossScaler(model, policy)
    scaler.backward(loss_of(model))
    scaler.step(optimizer)
    optimizer.zero_grad()
    saved = scaler.state_dict()
    with host.waits() as waits:
        scaler.load_state_dict(saved)
    assert waits == host.Waits()


SCALES = [(Static(2.0), True), (Static(0.5), False), (Dynamic(min_scale=0.5), True)]


@pytest.mark.filterwarnings("ignore:These parameters are FP16:UserWarning")
@pytest.mark.parametrize(("policy", "at_least_one"), SCALES)
def test_fp16_gradients_are_read_a_second_time_only_if_the_scale_is_below_one(
    monkeypatch: pytest.MonkeyPatch, policy: Policy, at_least_one: bool
) -> None:
    """Divided by such a scale they may leave the range of FP16, so that their largest magnitude is read too."""
    model = small_model().half()
    optimizer = OPTIMIZERS["sgd fused"](model.parameters())
    step = with_loss_scaler(policy, norm=True)
    step(model, optimizer, 0)  # the first one reads the largest magnitude for the metrics
    optimizer.zero_grad()
    reads: list[int] = []
    monkeypatch.setattr(measure, "largest", lambda grads, device: reads.append(len(grads)) or largest(grads, device))
    step(model, optimizer, 2)
    assert reads == ([] if at_least_one else [4])


def test_metrics_are_those_of_the_step_before_while_a_device_is_behind() -> None:
    model = small_model()
    optimizer = OPTIMIZERS["sgd fused"](model.parameters())
    scaler = LossScaler(model, Dynamic(init_scale=8.0, growth_interval=1))
    with host.busy():
        scaler.backward(_loss(model, 0))
        scaler.step(optimizer)
        with host.waits() as waits:
            metrics = scaler.metrics()
    assert waits == host.Waits()
    assert tuple(metrics) == METRICS
    assert (metrics["scale"], metrics["applied"], math.isnan(metrics["grad_norm"])) == (8.0, 0.0, True)
    assert (scaler.metrics()["scale"], scaler.metrics()["applied"]) == (16.0, 1.0)


class Untraced(Headroom):
    """A rule of a user, which does not say that it can be traced."""


@pytest.mark.parametrize(("policy", "reads"), [(Headroom(), 0), (Dynamic(), 0), (Untraced(), 1)], ids=repr)
def test_a_device_that_is_behind_is_waited_for_only_where_the_host_runs_the_rule(policy: Policy, reads: int) -> None:
    model = small_model()
    optimizer = OPTIMIZERS["adamw fused"](model.parameters())
    scaler = LossScaler(model, policy)
    with host.busy():
        for step in range(4):
            loss = _loss(model, step)
            with host.waits() as waits:
                scaled = scaler.scale(loss)
            assert len(waits.reads) == reads * (step > 0)
            with host.waits() as waits:
                scaled.backward()
                scaler.step(optimizer, clip_norm=1.0)
            assert waits == host.Waits()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["LossScaler", "GradScaler"])
def test_nothing_is_read_or_copied_to_show_a_scaler_and_its_result(kind: str) -> None:
    model = small_model()
    optimizer = OPTIMIZERS["sgd fused"](model.parameters())
    scaler: Any = LossScaler(model, Dynamic()) if kind == "LossScaler" else GradScaler("sim")
    scaler.scale(_loss(model, 0)).backward()
    scaler.step(optimizer)
    if kind == "GradScaler":
        scaler.update()
    with host.busy(), host.waits() as waits:
        shown, result = repr(scaler), repr(scaler.last)
    assert waits == host.Waits()
    about = "Dynamic(), " if kind == "LossScaler" else ""
    assert shown == f"{kind}({about}scale=65536.0, applied=0, skipped=0, last=<on sim:0>)"
    assert result == "StepResult(status=<on sim:0>, scale=<on sim:0>, next_scale=<on sim:0>)"
    assert scaler.last.skipped() is False
    assert repr(scaler.last).startswith("StepResult(status=applied, scale=<on sim:0>")


POLLED = [(Dynamic(), "sgd foreach", True), (NoScaling(), "sgd fused", True), (Dynamic(), "sgd fused", None)]


@pytest.mark.parametrize(("policy", "name", "known"), POLLED, ids=["read by the step", "constant", "on the device"])
def test_a_step_that_the_host_knows_can_be_polled_at_once(policy: Policy, name: str, known: bool | None) -> None:
    model = small_model()
    scaler, optimizer = LossScaler(model, policy), OPTIMIZERS[name](model.parameters())
    scaler.backward(loss_of(model))
    with host.busy():
        assert scaler.step(optimizer).poll() is known
    assert scaler.last is not None
    assert scaler.last.poll() is True


def test_the_drop_in_names_non_finite_parameters_after_unscale_and_a_fused_step() -> None:
    owners = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer, scaler = OPTIMIZERS["adamw fused"](owners), GradScaler("sim", init_scale=8.0)
    scaler.scale(owners[0].sum() + owners[1].sum()).backward()
    poison(owners[1], INF)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last is not None
    assert scaler.last.culprits() == [Culprit("param_groups[0].params[1]", "inf", 1)]


def test_a_stuck_run_is_reported_a_step_late() -> None:
    model = small_model()
    optimizer = OPTIMIZERS["sgd fused"](model.parameters())
    step = with_loss_scaler(Static(4.0), max_skips=2)
    for _ in range(2):
        step(model, optimizer, 1)
        optimizer.zero_grad()
    with pytest.raises(ScaleStuck):
        step(model, optimizer, 1)


@pytest.mark.parametrize("fused", [False, True])
def test_a_factor_has_arrived_before_gradients_in_host_memory_are_multiplied(fused: bool) -> None:
    """As where a part of the model is kept in host memory. The scale is on the device."""
    there, here = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="cpu"))
    optimizers = [torch.optim.SGD([weight], lr=0.5, fused=fused) for weight in (there, here)]
    scaler = LossScaler(policy=Dynamic(init_scale=8.0))
    with host.busy():
        scaler.backward(there.sum() + here.to("sim").sum())
        scaler.step(*optimizers, clip_value=10.0)
    assert (there.tolist(), here.tolist()) == ([0.5] * 3, [0.5] * 3)
