"""A step with fused optimizers reads nothing but the host copy of the step before, which `test_waits.py` counts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from benchmarks.traffic import Traffic
from tests.torch.helpers import INF, OPTIMIZERS, loss_of, poison, small_model
from tests.torch.versions import needs_gated_adagrad
from tests.torch.window.test_retry import narrow
from torch import Tensor, nn

from gradscale import Dynamic, NoScaling, Policy, Static
from gradscale.kernels.triton import operator
from gradscale.policies.headroom import Headroom
from gradscale.policies.histogram import Histogram
from gradscale.policies.log_max import LogMax
from gradscale.torch import LossScaler, host
from gradscale.torch.step import on_device

pytestmark = [pytest.mark.usefixtures("on_a_device"), pytest.mark.cpu_only("test_waits.py counts reads on a device")]

FUSED = [
    pytest.param(name, marks=needs_gated_adagrad if "adagrad" in name else ()) for name in OPTIMIZERS if "fused" in name
]

ESCAPES = ("tolist", "numpy", "cpu", "__array__")
"""Reads by the host that no dispatcher sees. On the CPU a `HostCopy` may use the first, which does not synchronize."""


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Counts every read except those of host copies, and of the operator that runs the rule."""
    with Traffic() as traffic, monkeypatch.context() as patched:
        for name in ESCAPES:
            original = getattr(Tensor, name)

            def counted(self: Tensor, *args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
                before = len(traffic.host_reads)
                found = original(self, *args, **kwargs)
                traffic.host_reads[before:] = [name]  # one read, whatever it calls: on a default device it calls itself
                return found

            patched.setattr(Tensor, name, counted)
        patched.setattr(host.HostCopy, "read", _uncounted(host.HostCopy.read, traffic.host_reads))
        # On the CPU it is the rule of the host, and stands for a kernel here.
        for module in (on_device, operator):
            patched.setattr(module, "advance", _uncounted(module.advance, traffic.host_reads))
        yield traffic.host_reads


def _uncounted(function: Any, reads: list[str]) -> Any:
    def uncounted(*arguments: Any) -> Any:
        before = len(reads)
        found = function(*arguments)
        del reads[before:]
        return found

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
