"""Only a step with an optimizer that has no fused kernel synchronizes with the device: it reads one flag."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.torch.accumulation.test_retry import narrow
from tests.torch.helpers import INF, OPTIMIZERS, loss_of, poison, small_model
from tests.torch.versions import needs_gated_adagrad
from torch import Tensor, nn

from gradscale import Dynamic, NoScaling, Policy, Static
from gradscale.bench.traffic import Traffic
from gradscale.engine.metrics import METRICS
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.policies.log_max import LogMax
from gradscale.torch import LossScaler
from gradscale.torch.ranks.rounds import Rounds
from gradscale.torch.step import host_copy

pytestmark = [pytest.mark.usefixtures("on_a_device"), pytest.mark.cpu_only("test_waits.py counts reads on a device")]

FUSED = [
    pytest.param(name, marks=needs_gated_adagrad if "adagrad" in name else ()) for name in OPTIMIZERS if "fused" in name
]

ESCAPES = ("tolist", "numpy", "cpu", "__array__")
"""Reads by the host that no dispatcher sees. On the CPU a `HostCopy` may use the first, which does not synchronize."""


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Counts every read except those of host copies."""
    with monkeypatch.context() as patched, Traffic() as traffic:
        for name in ESCAPES:
            original = getattr(Tensor, name)

            def counted(self: Tensor, *args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
                before = len(traffic.host_reads)
                found = original(self, *args, **kwargs)
                traffic.host_reads[before:] = [name]  # one read, whatever it calls: on a default device it calls itself
                return found

            patched.setattr(Tensor, name, counted)
        patched.setattr(host_copy.HostCopy, "read", _read_uncounted(traffic.host_reads))
        yield traffic.host_reads


def _read_uncounted(reads: list[str]) -> Any:
    read = host_copy.HostCopy.read

    def uncounted(self: host_copy.HostCopy) -> list[float]:
        before = len(reads)
        numbers = read(self)
        del reads[before:]
        return numbers

    return uncounted


def counts(monkeypatch: pytest.MonkeyPatch, optimizer_name: str, policy: Policy, **kwargs: Any) -> list[int]:
    """Returns how often the host read a tensor in clean and in overflowing steps."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scaler = LossScaler(model, policy)
    scaler.protect_buffers()
    found = []
    for step in range(4):
        loss = loss_of(model, step)
        with counting(monkeypatch) as reads:
            scaler.backward(loss)
            scaler.metrics()
        assert reads == []
        if step % 2:
            poison(model[0].weight, INF)
        with counting(monkeypatch) as reads:
            scaler.step(optimizer, **kwargs).poll()
            scaler.metrics()
        found.append(len(reads))
        optimizer.zero_grad()
    return found


POLICIES = [Dynamic(), Static(4.0), Headroom(), LogMax(), Histogram(), Dynamic(hysteresis=2, refill="clean")]


def test_the_counter_sees_every_way_to_read_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    flag = torch.tensor(True)
    for read in (bool, float, Tensor.item, Tensor.nonzero, lambda t: torch.equal(t, t)):
        with counting(monkeypatch) as reads:
            read(flag)
        assert len(reads) == 1
    for name in ESCAPES:
        with counting(monkeypatch) as reads:
            getattr(flag, name)()
        assert name in reads


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("arguments", [{}, {"clip_norm": 1.0}, {"clip_value": 1.0}], ids=str)
def test_a_step_with_a_fused_optimizer_reads_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, arguments: dict[str, float]
) -> None:
    assert counts(monkeypatch, name, Dynamic(), **arguments) == [0, 0, 0, 0]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_no_policy_reads_anything(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    assert counts(monkeypatch, "adamw fused", policy) == [0, 0, 0, 0]


# Adam's own loop reads its step counters, so what is its own is not counted here.
@pytest.mark.parametrize("name", ["sgd foreach"])
@pytest.mark.parametrize("arguments", [{}, {"clip_norm": 1.0}, {"clip_value": 1.0}], ids=str)
def test_a_step_with_any_other_optimizer_reads_once(
    monkeypatch: pytest.MonkeyPatch, name: str, arguments: dict[str, float]
) -> None:
    assert counts(monkeypatch, name, Dynamic(), **arguments) == [1, 1, 1, 1]


def test_several_optimizers_that_are_not_fused_read_once_together(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [small_model(0), small_model(1)]
    optimizers = [torch.optim.SGD(model.parameters(), foreach=True) for model in models]
    scaler = LossScaler(models, Dynamic())
    scaler.backward(loss_of(models[0]) + loss_of(models[1]))
    with counting(monkeypatch) as reads:
        scaler.step(*optimizers)
    assert len(reads) == 1


def test_without_scaling_nothing_is_read_for_any_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counts(monkeypatch, "sgd foreach", NoScaling()) == [0, 0, 0, 0]
    assert counts(monkeypatch, "sgd foreach", NoScaling(), clip_norm=1.0) == [0, 0, 0, 0]


def test_unscaled_grad_and_containers_of_losses_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = LossScaler(model, Dynamic())
    x = torch.ones(1, 4, requires_grad=True)
    with counting(monkeypatch) as reads:
        (grad,) = scaler.grad(model(x).sum(), x, create_graph=True)
        assert grad is not None
        for scaled in scaler.scale([loss_of(model), grad.square().sum()]):
            scaled.backward()
        with scaler.unscaled(optimizer):
            pass
        scaler.step(optimizer)
    assert reads == []


@pytest.mark.parametrize(("limit", "attempts"), [(INF, 1), (1024.0, 7), (-1.0, 11)])
def test_a_backward_pass_with_retries_reads_once_per_attempt(
    monkeypatch: pytest.MonkeyPatch, limit: float, attempts: int
) -> None:
    model = small_model()
    scaler = LossScaler(model, Dynamic(init_scale=65536.0))
    loss = narrow(loss_of(model), limit)
    with counting(monkeypatch) as reads:
        scaler.backward(loss, retries=10)
    assert len(reads) == attempts


def test_a_loss_that_is_not_finite_is_read_with_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    scaler = LossScaler(model, Dynamic())
    loss = loss_of(model) * INF
    with counting(monkeypatch) as reads:
        scaler.backward(loss, retries=3)
    assert len(reads) == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_micro_batches_and_a_batch_given_up_read_nothing(monkeypatch: pytest.MonkeyPatch, set_to_none: bool) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = LossScaler(policy=Dynamic())
    for _ in range(2):
        scaler.backward(loss_of(model))
        # Outside of the block: the mode that counts keeps a multi-tensor kernel from raising versions.
        optimizer.zero_grad(set_to_none=set_to_none)
        with counting(monkeypatch) as reads:
            for micro_batch in range(2):
                scaler.backward(loss_of(model, micro_batch))
            scaler.step(optimizer)
        assert reads == []
        optimizer.zero_grad(set_to_none=set_to_none)


class NoFaults:
    """What ranks have found at a step where nothing is wrong."""

    def __init__(self, *values: Tensor) -> None:
        self._count = len(values)

    def read(self) -> list[float]:
        return [0.0] * self._count


class NeverThere:
    """A host copy from a device that is always busy."""

    arrived = False

    def __init__(self, *values: Tensor) -> None:
        assert len({value.device for value in values}) == 1

    def read(self) -> list[float]:
        raise AssertionError("synchronized with the device")


class Folding(torch.optim.SGD):
    """A fused optimizer for a device that has none."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> None:
        del closure


def unknown(metrics: dict[str, float]) -> bool:
    """Returns whether all names are there, and no number has reached the host yet."""
    return tuple(metrics) == METRICS and all(map(math.isnan, metrics.values()))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_whole_loop_runs_on_a_device_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    for module in ("remember", "result"):
        monkeypatch.setattr(f"gradscale.torch.step.{module}.HostCopy", NeverThere)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to("meta")
    optimizer = Folding(model.parameters())
    scaler = LossScaler(model, policy)
    scaler.protect_buffers()
    guard = scaler.guard(lambda: None, on_skip="advance")
    for clip_norm in (None, 1.0):
        x = torch.ones(3, 4, device="meta", requires_grad=True)
        (grad,) = scaler.grad(model(x).sum(), x, create_graph=True)
        assert grad is not None
        scaler.backward(model(x).sum() + grad.sum())
        assert unknown(scaler.metrics())
        with scaler.unscaled(optimizer):
            pass
        result = scaler.step(optimizer, clip_norm=clip_norm, clip_value=1.0)
        assert result.applied.device.type == "meta"
        assert result.poll() is None
        assert unknown(scaler.metrics())
        assert guard.step()
        optimizer.zero_grad()


@contextmanager
def uploading(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Collects the numbers that are made into tensors on a device: such a copy synchronizes, and a fill does not."""
    sent: list[Any] = []
    with monkeypatch.context() as patched:
        for name in ("tensor", "as_tensor"):
            original = getattr(torch, name)

            def watched(data: Any, *args: Any, original: Any = original, **kwargs: Any) -> Tensor:
                made = original(data, *args, **kwargs)
                if not isinstance(data, Tensor) and made.device.type != "cpu":
                    sent.append(data)
                return made

            patched.setattr(torch, name, watched)
        yield sent


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_loop_copies_nothing_to_the_device(monkeypatch: pytest.MonkeyPatch, policy: Policy, ranks: int) -> None:
    monkeypatch.setattr("gradscale.torch.step.remember.HostCopy", NeverThere)
    monkeypatch.setattr(Rounds, "ranks", ranks)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: ranks)
    monkeypatch.setattr("gradscale.torch.ranks.faults.HostCopy", NoFaults)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: SimpleNamespace(wait=lambda: None))
    model = small_model().to("meta")
    optimizer = Folding(model.parameters())
    scaler = LossScaler(model, policy, device="meta")
    for norm in (False, True):
        scaler.backward(model(torch.ones(3, 4, device="meta")).sum())
        with uploading(monkeypatch) as sent:
            scaler.step(optimizer, norm=norm)
            scaler.metrics()
        assert sent == []
        optimizer.zero_grad()


def test_metrics_are_sent_for_again_only_when_they_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[NeverThere] = []

    class Slow(NeverThere):
        def __init__(self, *values: Tensor) -> None:
            self.values = values
            sent.append(self)

        def read(self) -> list[float]:
            return [value.item() for value in self.values]

    monkeypatch.setattr("gradscale.torch.step.remember.HostCopy", Slow)
    scaler = LossScaler(policy=Dynamic(init_scale=8.0))
    assert all(unknown(scaler.metrics()) for _ in range(9))
    assert len(sent) == 1
    sent[0].arrived = True
    assert scaler.metrics()["scale"] == 8.0
    assert len(sent) == 2
