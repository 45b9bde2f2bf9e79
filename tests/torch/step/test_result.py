"""`StepResult`: tensors on the device, copies on the host, and the non-finite parameters."""

import gc
import weakref

import numpy as np
import pytest
import torch
from tests.torch.helpers import INF, NAN, give, loss_of, poison, small_model
from torch import nn

from gradscale import Dynamic, NoScaling, Seen, Static, Status
from gradscale.engine.culprits import Culprit
from gradscale.torch import LossScaler, StepResult, host
from gradscale.torch.host import Facts, HostCopy

pytestmark = pytest.mark.usefixtures("either_way")


def stepped(*, bad: float | None = None, loss: float = 1.0, fused: bool = True) -> tuple[nn.Sequential, StepResult]:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = LossScaler(model, Dynamic(init_scale=1024.0, growth_interval=1))
    scaler.backward(loss_of(model) * loss)
    if bad is not None:
        poison(model[2].weight, bad, at=3)
    return model, scaler.step(optimizer)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("bad", "loss", "status", "next_scale"),
    [
        (None, 1.0, Status.APPLIED, 2048.0),
        (INF, 1.0, Status.OVERFLOW, 512.0),
        (NAN, 1.0, Status.OVERFLOW, 512.0),
        (None, NAN, Status.NONFINITE_LOSS, 1024.0),
        (None, INF, Status.NONFINITE_LOSS, 1024.0),
        (INF, NAN, Status.NONFINITE_LOSS, 1024.0),
    ],
)
def test_the_result_says_what_became_of_the_step(
    bad: float | None, loss: float, status: Status, next_scale: float, fused: bool
) -> None:
    _, result = stepped(bad=bad, loss=loss, fused=fused)
    applied = status is Status.APPLIED
    assert result.status() is status
    assert result.applied.dtype == torch.bool
    assert result.applied.shape == ()
    assert (result.applied.item(), result.skipped(), result.poll()) == (applied, not applied, applied)
    assert result.loss_finite.item() is (status is not Status.NONFINITE_LOSS)
    assert (result.scale.item(), result.next_scale.item()) == (1024.0, next_scale)
    assert result.attempted


def test_a_result_has_no_truth_value_but_its_flags_have() -> None:
    _, result = stepped()
    with pytest.raises(TypeError, match=r"A StepResult is neither true nor false\. Use `result\.skipped\(\)`"):
        bool(result)
    for method in (result.skipped, result.status, result.culprits, result.poll):
        with pytest.raises(TypeError, match=r"is a method, which has no truth value\. Call it: `result\.\w+\(\)`\.$"):
            bool(method)
    assert result.applied


def test_a_loss_that_was_not_finite_in_any_micro_batch_takes_precedence() -> None:
    for bad_one in range(3):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters())
        scaler = LossScaler(model, Dynamic())
        for micro_batch in range(3):
            scaler.backward(loss_of(model, micro_batch) * (NAN if micro_batch == bad_one else 1.0))
        assert scaler.step(optimizer).status() is Status.NONFINITE_LOSS


def test_the_scaler_keeps_the_last_result() -> None:
    model = small_model()
    scaler = LossScaler(model)
    assert scaler.last is None
    scaler.backward(loss_of(model))
    result = scaler.step(torch.optim.SGD(model.parameters()))
    assert scaler.last is result


@pytest.mark.parametrize(("bad", "kind"), [(INF, "inf"), (-INF, "inf"), (NAN, "nan")])
def test_culprits_are_named_with_their_kind_and_count(bad: float, kind: str) -> None:
    model, result = stepped(bad=bad)
    assert result.culprits() == [Culprit("2.weight", kind, 1)]  # type: ignore[arg-type]
    assert model[2].weight.grad is not None


class Labeled(torch.Tensor):
    """A tensor of another type that is not spread over ranks."""


@pytest.mark.parametrize("fused", [True, False])
def test_culprits_among_gradients_of_a_type_of_their_own_are_named(fused: bool) -> None:
    weight = nn.Parameter(torch.zeros(2))
    scaler, optimizer = LossScaler(policy=Dynamic()), torch.optim.SGD([("w", weight)], fused=fused)
    for value in (1.0, INF):  # the first step measures sizes anyway
        give(scaler, [weight], [torch.tensor([value, 1.0]).as_subclass(Labeled)])
        result = scaler.step(optimizer)
        weight.grad = None
    assert [(culprit.name, culprit.kind) for culprit in result.culprits()] == [("w", "inf")]


def test_a_gradient_with_both_counts_as_nan() -> None:
    weight = nn.Parameter(torch.zeros(4))
    scaler, optimizer = LossScaler(policy=Dynamic()), torch.optim.SGD([("w", weight)])
    give(scaler, [weight], [torch.tensor([INF, NAN, 1.0, -INF])])
    for norm in (True, False):
        result = scaler.step(optimizer, norm=norm)
        assert result.culprits() == [Culprit("w", "nan", 3)]
        weight.grad = None
        give(scaler, [weight], [torch.tensor([INF, NAN, 1.0, -INF])])


def test_culprits_come_in_the_order_of_the_optimizers() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters())
    scaler = LossScaler(model, Dynamic())
    scaler.backward(loss_of(model))
    poison(model[2].bias, NAN)
    poison(model[0].bias, INF)
    assert [(c.name, c.kind) for c in scaler.step(optimizer).culprits()] == [("0.bias", "inf"), ("2.bias", "nan")]


def test_a_step_without_culprits_has_none() -> None:
    assert stepped()[1].culprits() == []


@pytest.mark.cpu_only("`either_way` stands for a device, and the simulated one keeps gradients alive")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clear", ["zero_grad", "zero in place", "another backward pass"])
def test_counts_outlive_the_gradients_where_the_host_knew_in_the_step_that_it_is_skipped(
    clear: str, fused: bool
) -> None:
    model, result = stepped(bad=INF, fused=fused)
    if clear == "zero_grad":
        model.zero_grad()
    elif clear == "zero in place":
        model.zero_grad(set_to_none=False)
    else:
        loss_of(model).backward()
    known = not fused or host.in_host_memory(next(model.parameters()).device)
    assert result.culprits() == [Culprit("2.weight", "inf", 1 if known else None)]


def test_a_result_keeps_no_gradient_alive() -> None:
    model, result = stepped(bad=INF)
    gradient = weakref.ref(model[2].weight.grad)
    model.zero_grad()
    gc.collect()
    assert gradient() is None
    assert result.culprits()[0].name == "2.weight"


def test_a_culprit_that_is_gone_is_said_to_be() -> None:
    weight = nn.Parameter(torch.zeros(1))
    scaler, optimizer = LossScaler(policy=Dynamic()), torch.optim.SGD([weight])
    give(scaler, [weight], [torch.tensor([INF])])
    result = scaler.step(optimizer)
    del weight, optimizer
    gc.collect()
    assert result.culprits() == [Culprit("(a parameter that is gone)", "inf", 1)]


def test_culprits_of_several_models_have_distinct_names() -> None:
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    optimizer = torch.optim.SGD([parameter for model in models for parameter in model.parameters()])
    scaler = LossScaler(models, Dynamic())
    scaler.backward(models[1](models[0](torch.ones(1, 1))).sum())
    poison(models[1].weight)
    assert [culprit.name for culprit in scaler.step(optimizer).culprits()] == ["1.weight"]


def test_without_scaling_every_step_counts_as_applied() -> None:
    model = small_model()
    scaler = LossScaler(model, NoScaling())
    scaler.backward(loss_of(model))
    result = scaler.step(torch.optim.SGD(model.parameters()), clip_norm=1.0)
    assert result.status() is Status.APPLIED
    assert result.scale.item() == 1.0
    assert result.grad_norm is not None


class Arrival:
    """Stands for an event of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.arrived, self.synchronized, self.recorded = device, False, False, False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        self.synchronized = self.arrived = True


class OnAccelerator(torch.Tensor):
    """A tensor that claims to be on an accelerator."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")

    def to(self, *args: object, **kwargs: object) -> torch.Tensor:
        assert (args, kwargs) == (("cpu",), {"non_blocking": True})
        return self.as_subclass(torch.Tensor)


@pytest.fixture
def copy(monkeypatch: pytest.MonkeyPatch) -> HostCopy:
    monkeypatch.setattr(torch, "Event", Arrival)
    return HostCopy(torch.tensor([2.0, 1.0]).as_subclass(OnAccelerator))


def test_a_host_copy_from_an_accelerator_says_when_it_has_arrived(copy: HostCopy) -> None:
    event = copy._arrival
    assert isinstance(event, Arrival)
    assert event.recorded
    assert not copy.arrived
    event.arrived = True
    assert copy.arrived
    assert not event.synchronized
    assert copy.read() == [2.0, 1.0]


def test_reading_a_host_copy_synchronizes(copy: HostCopy) -> None:
    event = copy._arrival
    assert isinstance(event, Arrival)
    assert copy.read() == [2.0, 1.0]
    assert event.synchronized


def test_polling_never_synchronizes(copy: HostCopy) -> None:
    _, result = stepped()
    result.known, result.facts = None, Facts(copy=copy, read=lambda numbers: Seen(finite=np.bool_(numbers[1])))
    assert result.poll() is None
    event = copy._arrival
    assert isinstance(event, Arrival)
    event.arrived = True
    assert result.poll() is True


def test_a_static_scale_is_its_own_next_scale() -> None:
    model = small_model()
    scaler = LossScaler(model, Static(8.0))
    scaler.backward(loss_of(model))
    result = scaler.step(torch.optim.SGD(model.parameters()))
    assert (result.scale.item(), result.next_scale.item()) == (8.0, 8.0)
