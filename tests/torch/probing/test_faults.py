"""Faults that people have in real runs, each injected once, and what probe and health say of them."""

import math
from collections.abc import Callable

import pytest
import torch
from tests.torch.helpers import autocast
from tests.torch.probing.models import Attention, Block, Stack, fp16_step, rows
from torch import Tensor, nn

from gradscale import Dynamic, Headroom, Policy, Static
from gradscale.engine.health import Condition, Health
from gradscale.engine.probe_report import ProbeReport
from gradscale.torch import LossScaler, Verdict


def train(
    model: nn.Module, step: Callable[[], Tensor], policy: Policy, steps: int = 25, lr: float = 1e-3
) -> tuple[LossScaler, Health]:
    """Returns the scaler of a run, and its health after the last step."""
    scaler = LossScaler(model, policy, on_stuck="ignore")
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    vars(model)["optimizer"] = optimizer  # a scaler refers to it weakly
    for _ in range(steps):
        scaler.backward(step())
        scaler.step(optimizer)
        optimizer.zero_grad()
    return scaler, scaler.health()


def two_blocks() -> Stack:
    return Stack(Block(), Block())


def check_place(report: ProbeReport, phase: str, module: str | None, line: str) -> None:
    """Compares pass, module and line of the operation that a report names with the right ones."""
    assert report.operation is not None
    assert report.operation.source is not None
    assert (report.operation.phase, report.operation.module) == (phase, module)
    # On the simulated device autocast is Python of the tests, and has the innermost line.
    assert line == report.operation.source.text or "/sim/" in report.operation.source.file


def test_a_nan_in_one_weight() -> None:
    model = two_blocks()
    with torch.no_grad():
        model.parts[1].fc2.weight[1, 2] = math.nan  # type: ignore[index]
    scaler, health = train(model, fp16_step(model), Headroom(), steps=3)
    assert health.condition is Condition.BROKEN
    assert "parts.1.fc2.weight were inf or NaN before the first step" in health.advice
    report = scaler.probe(fp16_step(model))
    assert (report.verdict, report.tensor) == (Verdict.BROKEN_WEIGHTS, "parts.1.fc2.weight")
    check_place(report, "forward", "parts.1.fc2", "h = self.fc2(torch.tanh(self.fc1(x)))")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_inf_in_the_input(value: float) -> None:
    model = two_blocks()
    x = rows()
    x[3, 1] = value
    scaler, health = train(model, fp16_step(model, x), Headroom(), steps=3)
    assert health.condition is Condition.NONFINITE_LOSS
    assert "the input batch" in health.advice
    report = scaler.probe(fp16_step(model, x), other=fp16_step(model))
    assert report.verdict is Verdict.BROKEN_DATA
    assert report.tensor == "an input, float32 of shape [8, 4]"
    check_place(report, "forward", "embed", "x = self.embed(x)")


def test_an_fp16_softmax_that_overflows_in_one_layer() -> None:
    model = Stack(Attention(), Attention(gain=1e4))
    scaler, health = train(model, fp16_step(model), Headroom(), steps=3)
    assert health.condition is Condition.NONFINITE_LOSS
    report = scaler.probe(fp16_step(model))
    assert report.operation is not None
    assert (report.verdict, report.operation.name) == (Verdict.FORWARD_OVERFLOW, "mm")
    scores = "scores = self.query(x * self.gain) @ self.key(x * self.gain).transpose(-1, -2)"
    check_place(report, "forward", "parts.1", scores)
    assert report.operation.inputs_finite
    assert "no loss scale can help" in report.advice
    assert "`parts.1` in float32" in report.advice


def test_a_residual_add_between_modules_that_overflows() -> None:
    model = two_blocks()
    nn.init.constant_(model.embed.bias, 40000.0)
    nn.init.constant_(model.parts[1].fc2.bias, 40000.0)  # type: ignore[arg-type]
    report = LossScaler(model).probe(fp16_step(model))
    assert report.operation is not None
    assert (report.verdict, report.operation.name) == (Verdict.FORWARD_OVERFLOW, "add")
    check_place(report, "forward", "parts.1", "return x + h  # the residual add")
    assert report.operation.inputs_finite


def test_a_learning_rate_that_is_far_too_high() -> None:
    model = two_blocks()
    scaler, health = train(model, fp16_step(model), Headroom(), steps=10, lr=1e6)
    assert health.condition is Condition.BROKEN
    assert "the learning rate (1e+06) is too high" in health.advice
    report = scaler.probe(fp16_step(model))
    assert report.verdict is Verdict.BROKEN_WEIGHTS
    assert "the learning rate (1e+06) is too high" in report.advice
    assert any(f"in {name}, is" in report.advice for name, _ in model.named_parameters())


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_a_loss_weight_of_a_billionth(scale: float) -> None:
    model = two_blocks()
    _, health = train(model, fp16_step(model, weight=1e-9), Static(scale))
    assert health.condition is Condition.UNDERFLOWING
    assert "weight of the loss" in health.advice or "All gradients are zero" in health.advice
    assert train(model, fp16_step(model, weight=1e-9), Headroom(), steps=60)[1].condition is Condition.OK


def test_a_frozen_layer() -> None:
    model = two_blocks()
    model.parts[0].requires_grad_(False)
    scaler = LossScaler(model, Headroom())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(25):
        scaler.backward(fp16_step(model)())
        scaler.step(optimizer)
        optimizer.zero_grad()
    health = scaler.health()
    assert health.condition is Condition.OK
    assert health.evidence["parameters_without_gradient"] == 4
    assert "4 parameters had no gradient" in health.advice
    assert "parts.0.fc1.weight" in health.advice


class Normed(nn.Module):
    """BatchNorm of a channel that is the same for all rows."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, eps=eps)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        constant = x.clone()
        constant[:, 2] = 1.0
        return self.head(self.norm(constant))


def test_a_batchnorm_with_a_constant_channel() -> None:
    model = Normed(eps=1e-320)  # zero in float32; torch refuses 0 itself
    before = [each.clone() for each in model.buffers()]
    report = LossScaler(model).probe(lambda: model(rows()).square().mean())
    assert report.operation is not None
    assert (report.verdict, report.operation.name) == (Verdict.UNDEFINED, "native_batch_norm")
    assert report.operation.module_type == "BatchNorm1d"
    check_place(report, "forward", "norm", "return self.head(self.norm(constant))")
    assert "epsilon" in report.advice
    assert all(map(torch.equal, model.buffers(), before))
    sound = Normed(eps=1e-5)
    assert LossScaler(sound, Static(1.0)).probe(lambda: sound(rows()).square().mean()).verdict is Verdict.FINITE


def test_a_batchnorm_with_a_constant_channel_and_the_usual_epsilon() -> None:
    """Its gradient is 316 times as large as that of its output, 1 / sqrt(1e-5), and overflows first."""
    first = nn.Linear(4, 4)
    nn.init.zeros_(first.weight[2])
    model = nn.Sequential(first, nn.BatchNorm1d(4), nn.Linear(4, 2))

    def step() -> Tensor:
        with autocast():
            return model(rows()).float().square().mean()

    report = LossScaler(model, Static(2.0**15)).probe(step)
    assert report.operation is not None
    assert (report.verdict, report.operation.name) == (Verdict.SCALE_TOO_HIGH, "native_batch_norm_backward")
    check_place(report, "backward", "1", "return model(rows()).float().square().mean()")


def test_stale_gradients() -> None:
    model = two_blocks()
    scaler = LossScaler(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler.backward(fp16_step(model)())
    scaler.step(optimizer)
    scaler.backward(fp16_step(model)())  # without `zero_grad`
    with pytest.raises(RuntimeError, match=r"Gradients from before the last step are still there.*embed\.weight"):
        scaler.step(optimizer)


def test_a_scale_that_is_forced_too_high() -> None:
    model = two_blocks()
    scaler, health = train(model, fp16_step(model), Static(2.0**40), steps=5)
    assert health.condition is Condition.STUCK
    report = scaler.probe(fp16_step(model))
    assert report.verdict is Verdict.SCALE_TOO_HIGH
    # The loss is float32, and its gradient overflows where it is cast to the FP16 of the model's output.
    check_place(report, "backward", None, "return output.float().square().mean() * weight")
    assert report.halvings is not None
    fits = 2.0 ** (40 - report.halvings)
    assert train(model, fp16_step(model), Static(fits))[1].condition is Condition.OK


def test_a_scale_that_is_forced_too_low() -> None:
    model = two_blocks()
    _, health = train(model, fp16_step(model), Static(2.0**-20))
    assert health.condition is Condition.UNDERFLOWING
    assert "Raise the scale" in health.advice


def test_no_fault() -> None:
    model = two_blocks()
    scaler, health = train(model, fp16_step(model), Dynamic(init_scale=1024.0))
    assert health.condition is Condition.OK
    assert health.advice == "Nothing to do."
    assert scaler.probe(fp16_step(model)).verdict is Verdict.FINITE

    def plain() -> Tensor:
        with autocast(enabled=False):
            return model(rows()).square().mean()

    assert scaler.probe(plain).verdict is Verdict.FINITE
