"""`ScaleStuck`: a run that skips every step raises, with the non-finite parameters and the likely cause."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.torch.helpers import INF, NAN, loss_of, poison, small_model, train_step
from torch import Tensor, nn

from gradscale import Dynamic, Policy, Static
from gradscale.policies.headroom import Headroom
from gradscale.torch import LossScaler, ScaleStuck

pytestmark = pytest.mark.cpu_only("a device is read a few steps late; `on_a_device` and `either_way` stand for one")

FLOOR = Dynamic(init_scale=4.0, min_scale=1.0)


def stuck_at(policy: Policy, damage: Callable[[nn.Sequential], None], loss: float = 1.0) -> tuple[int, ScaleStuck]:
    """Returns the step at which a run with the same damage in every step is given up, and the error."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = LossScaler(model, policy, max_consecutive_skips=5)
    for step in range(200):
        scaler.backward(loss_of(model) * loss)
        damage(model)
        try:
            scaler.step(optimizer)
        except ScaleStuck as error:
            return step + 1, error
        optimizer.zero_grad()
    raise AssertionError("never stuck")


def in_one(model: nn.Sequential) -> None:
    poison(model[2].bias, NAN)


def in_some(model: nn.Sequential) -> None:
    poison(model[0].weight)
    poison(model[2].bias)


def in_all(model: nn.Sequential) -> None:
    for parameter in model.parameters():
        poison(parameter, NAN)


def in_none(model: nn.Sequential) -> None:
    pass


@pytest.mark.parametrize(
    ("damage", "loss", "cause"),
    [
        (in_none, NAN, "No scale, retry or policy can help: look at the forward pass and the input batch"),
        (
            in_one,
            1.0,
            r"The gradient of one parameter, '2\.bias', overflows\. Look at its hooks and at the backward pass",
        ),
        (
            in_some,
            1.0,
            r"2 of 4 gradients overflow\. Likely cause: part of the model overflows at any scale\. Keep the",
        ),
        (in_all, 1.0, r"Every gradient is inf or NaN although the loss is finite\. Likely cause: a division, a sqrt"),
    ],
)
def test_the_likely_cause_is_named(damage: Callable[[nn.Sequential], None], loss: float, cause: str) -> None:
    step, error = stuck_at(FLOOR, damage, loss)
    assert step == 5
    with pytest.raises(ScaleStuck, match=rf"5 steps in a row were skipped.*{cause}"):
        raise error


def test_the_culprits_are_listed_with_their_kind() -> None:
    _, error = stuck_at(FLOOR, in_one)
    assert [(culprit.name, culprit.kind) for culprit in error.culprits] == [("2.bias", "nan")]
    assert "Gradients that were not finite: 2.bias (nan)." in str(error)


def test_at_most_five_culprits_are_listed_in_the_text() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))
    scaler = LossScaler(model, Static(1.0), max_consecutive_skips=1)
    scaler.backward(model(torch.ones(1, 1)).sum())
    for parameter in model.parameters():
        poison(parameter)
    with pytest.raises(ScaleStuck, match=r"0\.weight \(inf\).*2\.weight \(inf\) and 3 more\.") as caught:
        scaler.step(torch.optim.SGD(model.parameters()))
    assert len(caught.value.culprits) == 8


def test_gradients_that_only_grad_took_are_a_cause_of_their_own() -> None:
    model = small_model()
    scaler = LossScaler(model, Static(2.0**20), max_consecutive_skips=1)
    x = torch.ones(1, dtype=torch.float16, requires_grad=True)
    scaler.grad((x.float() * 2.0).sum(), x)
    scaler.backward(loss_of(model))
    with pytest.raises(
        ScaleStuck, match=r"Gradients overflowed that the step did not read\. Likely cause: .*`scaler\.grad`"
    ):
        scaler.step(torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("policy", [FLOOR, Static(8.0), Headroom(min_scale=1.0)], ids=lambda p: type(p).__name__)
def test_every_policy_can_be_stuck(policy: Policy) -> None:
    step, _ = stuck_at(policy, in_all)
    assert 5 <= step <= 30


def test_a_run_that_can_still_lower_its_scale_is_not_stuck() -> None:
    step, error = stuck_at(Dynamic(init_scale=2.0**20), in_all)
    assert step == 21
    assert "no lower scale than 1 can help" in str(error)


def test_a_run_that_applies_a_step_now_and_then_is_not_stuck() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters())
    scaler = LossScaler(model, FLOOR, max_consecutive_skips=3)
    for step in range(12):
        train_step(scaler, model, optimizer, bad=None if step % 3 == 2 else INF)


def stuck_run(on_stuck: Any, bad_steps: int = 6) -> tuple[LossScaler, nn.Sequential, torch.optim.Optimizer]:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters())
    scaler = LossScaler(model, Static(8.0), max_consecutive_skips=3, on_stuck=on_stuck)
    for _ in range(bad_steps):
        train_step(scaler, model, optimizer, bad=INF)
    return scaler, model, optimizer


def test_a_warning_comes_once_and_points_at_the_step() -> None:
    with pytest.warns(UserWarning, match="3 steps in a row were skipped") as caught:
        scaler, model, optimizer = stuck_run("warn")
    assert [warning.filename.rsplit("/", 1)[-1] for warning in caught] == ["helpers.py"]
    train_step(scaler, model, optimizer)
    for _ in range(2):
        train_step(scaler, model, optimizer, bad=INF)
    with pytest.warns(UserWarning, match="3 steps in a row were skipped"):
        train_step(scaler, model, optimizer, bad=INF)


def test_a_function_is_called_once_with_the_error() -> None:
    reported: list[ScaleStuck] = []
    stuck_run(reported.append)
    assert [(type(error), error.culprits[0].name) for error in reported] == [(ScaleStuck, "0.weight")]


def test_raising_goes_on_and_the_state_stays_whole() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters())
    scaler = LossScaler(model, Static(8.0), max_consecutive_skips=2)
    for step in range(5):
        scaler.backward(loss_of(model))
        poison(model[0].weight)
        if step < 1:
            scaler.step(optimizer)
        else:
            with pytest.raises(ScaleStuck, match=f"{step + 1} steps in a row"):
                scaler.step(optimizer)
        optimizer.zero_grad()
    assert scaler.metrics()["skipped"] == 5
    assert not train_step(scaler, model, optimizer).skipped()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"max_consecutive_skips": 0},
            ValueError,
            "`max_consecutive_skips` must be between 1 and 2**31 - 1. Received: max_consecutive_skips=0",
        ),
        (
            {"max_consecutive_skips": 1.5},
            TypeError,
            "`max_consecutive_skips` must be an integer. Received: max_consecutive_skips=1.5",
        ),
        (
            {"max_consecutive_skips": True},
            TypeError,
            "`max_consecutive_skips` must be an integer. Received: max_consecutive_skips=True",
        ),
        (
            {"on_stuck": "shout"},
            ValueError,
            "`on_stuck` must be 'raise', 'warn', 'ignore' or a function. Received: on_",
        ),
        (
            {"policy": "fast"},
            ValueError,
            "`policy` must be a policy, such as `Dynamic()`, or name one. Received: policy='fast': there is no policy",
        ),
        (
            {"policy": Dynamic},
            TypeError,
            "`policy` must be a policy, such as `Dynamic()`, or the name of one. Received: policy=<class",
        ),
        ({"model": Dynamic()}, TypeError, "`model` must be a module or a list of modules. Received: Dynamic("),
        ({"model": [1]}, TypeError, "`model` must be a module or a list of modules. Received: [1]. Pass a policy as"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        LossScaler(**arguments)
    assert text in str(caught.value)


def test_a_loaded_run_that_is_stuck_is_reported_again() -> None:
    found: list[ScaleStuck] = []
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = LossScaler(model, Static(8.0), max_consecutive_skips=2, on_stuck=found.append)
    for _ in range(3):
        train_step(scaler, model, optimizer, bad=INF)
    assert len(found) == 1
    scaler.load_state_dict(scaler.state_dict())
    train_step(scaler, model, optimizer, bad=INF)
    assert len(found) == 2


def batches(bad_from: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields batches of one task; from `bad_from` on, with a NaN in each."""
    generator = torch.Generator().manual_seed(1)
    for number in range(200):
        x, y = torch.randn(32, 16, generator=generator), torch.randn(32, 4, generator=generator)
        if bad_from is not None and number >= bad_from:
            x[0, 0] = NAN
        yield x, y


def regression_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def error_of_a_real_run(
    optimizer_of: Callable[[Any], torch.optim.Optimizer],
    *,
    last: nn.Module | None = None,
    loss_of_output: Callable[[Tensor, Tensor], Tensor] = regression_loss,
    bad_from: int | None = None,
) -> ScaleStuck:
    """Returns the error of a run in FP16 that is stuck."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), last or nn.Linear(64, 4))
    optimizer = optimizer_of(model.parameters())
    scaler = LossScaler(model, max_consecutive_skips=10)
    for x, y in batches(bad_from):
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(x)
        scaler.backward(loss_of_output(output, y))
        try:
            scaler.step(optimizer)
        except ScaleStuck as error:
            return error
        optimizer.zero_grad()
    raise AssertionError("never stuck")


RATES: dict[str, tuple[Any, float]] = {
    "SGD 30": (torch.optim.SGD, 30.0),
    "SGD 1e3": (torch.optim.SGD, 1e3),
    "Adam 100": (torch.optim.Adam, 100.0),
    "Adam 1e5": (torch.optim.Adam, 1e5),
}


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("kind", "lr"), RATES.values(), ids=RATES)
def test_a_learning_rate_that_is_too_high_is_named_with_the_size_of_the_weights(
    kind: Any, lr: float, fused: bool
) -> None:
    text = str(error_of_a_real_run(lambda params: kind(params, lr=lr, fused=fused)))
    assert re.search(r"the loss is inf or NaN since step [2-9]\.", text)
    assert re.search(r"The largest weight, in [\w.]+, is \S+ after \d+ updates?, and was 0\.25 before the first", text)
    assert f" Likely cause: the learning rate ({lr:g}) is too high" in text


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


class Overflows(nn.Module):
    """Activations that FP16 cannot hold, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x + 1).half() * 65504)


def test_a_nan_in_the_batches_is_not_taken_for_the_learning_rate() -> None:
    error = error_of_a_real_run(adamw, bad_from=20)
    assert error.cause.endswith("No scale, retry or policy can help: look at the forward pass and the input batch.")
    assert "Likely cause" not in error.cause
    assert "the loss is inf or NaN since step 21." in str(error)


def test_a_logarithm_of_zero_is_not_taken_for_the_learning_rate() -> None:
    error = error_of_a_real_run(adamw, loss_of_output=lambda output, y: (output.float() * 0).log().mean())
    assert error.cause.endswith("No scale, retry or policy can help: look at the forward pass and the input batch.")
    assert "Likely cause" not in error.cause
    assert "skipped, every step so far, and the loss is inf or NaN." in str(error)


def test_an_activation_that_overflows_in_fp16_is_not_taken_for_the_learning_rate() -> None:
    error = error_of_a_real_run(adamw, last=Overflows())
    assert error.cause.endswith("No scale, retry or policy can help: look at the forward pass and the input batch.")
    assert "Likely cause" not in error.cause


def test_weights_that_are_large_by_design_are_not_taken_for_the_learning_rate() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.full((64,), 900.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain / 900

    error = error_of_a_real_run(adamw, last=nn.Sequential(Gain(), nn.Linear(64, 4)), bad_from=20)
    assert "Likely cause" not in error.cause


@pytest.mark.usefixtures("on_a_device")
def test_on_a_device_the_step_since_which_the_loss_is_not_finite_is_exact() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = LossScaler(model, max_consecutive_skips=3)
    for step in range(1, 26):  # a step later than on the CPU
        scaler.backward(loss_of(model) * (NAN if step >= 23 else 1.0))
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.backward(loss_of(model) * NAN)
    with pytest.raises(ScaleStuck, match=r"^3 steps in a row were skipped, and the loss is .* since step 23\."):
        scaler.step(optimizer)
