"""How often the drop-in synchronizes with the device: never with fused optimizers, else once a step."""

from typing import Any, ClassVar

import pytest
import torch
from tests.torch.drop_in.helpers import OURS, TORCH, HostReads, batches, give, linear_pair, parameter, ready
from tests.torch.helpers import poison
from torch import nn

from gradscale import Dynamic, Headroom
from gradscale.policies.scalars import EXACT
from gradscale.torch import GradScaler
from gradscale.torch.drop_in import scale_bound as scale_bound_module
from gradscale.torch.drop_in.scale_bound import ASK_BELOW, ScaleBound


def reads_per_step(scaler: Any, bad: bool = False, clip: bool = False, **kwargs: Any) -> int:
    """Returns the host reads of one training step, after one that made whatever is made once."""
    model = linear_pair()
    optimizer = torch.optim.AdamW(model.parameters(), **kwargs)
    counted = 0
    for x, y in batches(2):
        optimizer.zero_grad()
        with HostReads() as reads:
            scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
            if bad:
                poison(next(model.parameters()))
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            scaler.step(optimizer)
            scaler.update()
            _ = scaler.last.applied, scaler.last.poll() if hasattr(scaler, "last") else None
        counted = reads.count
    return counted


def own_reads(kind: Any, **kwargs: Any) -> int:
    """Returns the host reads that are the scaler's, not the optimizer's."""
    optimizer_kwargs = {key: value for key, value in kwargs.items() if key in ("fused", "foreach")}
    scaler_kwargs = {key: value for key, value in kwargs.items() if key not in ("fused", "foreach", "bad", "clip")}
    loop = {key: kwargs[key] for key in ("bad", "clip") if key in kwargs}
    return reads_per_step(kind("cpu", **scaler_kwargs), **loop, **optimizer_kwargs)


@pytest.mark.parametrize("scale", [2.0**16, 2.0**-10])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_fused_step_never_synchronizes(bad: bool, clip: bool, scale: float) -> None:
    assert own_reads(OURS, fused=True, bad=bad, clip=clip, init_scale=scale) == 0


@pytest.mark.skipif(not EXACT, reason="with numpy 1 the rule runs on tensors, whose reads on a CPU are counted")
@pytest.mark.parametrize("policy", [Headroom()])
def test_fused_step_under_a_policy_never_synchronizes(policy: Any) -> None:
    assert own_reads(OURS, fused=True, policy=policy) == 0
    assert own_reads(OURS, fused=True, hysteresis=2) == 0


@pytest.mark.parametrize("scale", [2.0**16, 2.0**-10])
@pytest.mark.parametrize("clip", [False, True])
def test_skipped_step_of_another_optimizer_synchronizes_once(clip: bool, scale: float) -> None:
    assert own_reads(OURS, foreach=True, bad=True, clip=clip, init_scale=scale) == 1


@pytest.mark.parametrize("scale", [2.0**16, 2.0**-10])
def test_applied_step_of_another_optimizer_synchronizes_as_often_as_with_torch(scale: float) -> None:
    ours, theirs = (_reads_of_sgd(kind("cpu", init_scale=scale)) for kind in (OURS, TORCH))
    assert ours == theirs == 1


def _reads_of_sgd(scaler: Any) -> int:
    """Returns the reads of a step with an optimizer that has none of its own."""
    owner = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([owner], lr=0.1, foreach=True)
    scaler.scale(owner.sum()).backward()
    with HostReads() as reads:
        scaler.step(optimizer)
        scaler.update()
    return reads.count


def test_several_devices_are_read_at_once() -> None:
    owner = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([owner], lr=0.1, foreach=True)
    scaler = GradScaler("cpu")
    scaler.scale(owner.sum()).backward()
    scaler.unscale_(optimizer)
    flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    flags[torch.device("cpu", 1)] = torch.zeros(())
    with HostReads() as reads:
        scaler.step(optimizer)
        scaler.update()
    assert reads.count == 1


class SlowCopy:
    """A host copy that arrives when the test says so, as on an accelerator that is busy."""

    sent: ClassVar[list["SlowCopy"]] = []

    def __init__(self, scale: torch.Tensor) -> None:
        self.value, self.arrived = scale.item(), False
        SlowCopy.sent.append(self)

    def read(self) -> list[float]:
        assert self.arrived, "read before it arrived: that would synchronize"
        return [self.value]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch, on_a_device: None) -> list[SlowCopy]:
    monkeypatch.setattr(scale_bound_module, "HostCopy", SlowCopy)
    SlowCopy.sent = []
    return SlowCopy.sent


def halve(known: ScaleBound, scale: torch.Tensor) -> None:
    known.revalidate(scale)
    scale.mul_(0.5)
    known.lowered(scale, 0.5)


def test_large_scale_is_known_to_be_above_one_without_a_host_copy(copies: list[SlowCopy]) -> None:
    known, scale = ScaleBound(), torch.tensor(2.0**16)
    known.set(scale, 2.0**16)
    for _ in range(8):
        halve(known, scale)
        assert not known.may_be_below_one(scale)
    assert copies == []


@pytest.mark.parametrize("policy", [None, Dynamic()])
def test_scale_that_update_has_lowered_is_known_to_be_above_one(policy: Any, copies: list[SlowCopy]) -> None:
    scaler, weight = ready(OURS("cpu", policy=policy)), parameter()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(4):
        give((weight, torch.inf))
        scaler.step(optimizer)
        scaler.update()
        assert not scaler._bound.may_be_below_one(scaler._scale)
    assert copies == []


def test_host_copy_is_started_early_and_the_bound_is_kept_until_it_arrives(copies: list[SlowCopy]) -> None:
    known, scale = ScaleBound(), torch.tensor(ASK_BELOW)
    known.set(scale, ASK_BELOW)
    for _ in range(10):
        known.revalidate(scale)
        scale.mul_(1.0)
        known.lowered(scale, 0.5)
    assert len(copies) == 1
    assert known.may_be_below_one(scale)
    copies[0].arrived = True
    assert known.may_be_below_one(scale), "256 may have been halved nine times since the copy was started"
    known.revalidate(scale)
    known.lowered(scale, 0.5)
    copies[1].arrived = True
    assert not known.may_be_below_one(scale)


def test_scale_below_one_is_never_missed(copies: list[SlowCopy]) -> None:
    known, scale = ScaleBound(), torch.tensor(2.0**10)
    known.set(scale, 2.0**10)
    for step in range(12):
        halve(known, scale)
        for copy in copies[::2] if step % 3 else copies:
            copy.arrived = True
        assert known.may_be_below_one(scale) or scale.item() >= 1


def test_scale_that_others_wrote_to_is_unknown_until_it_is_read(copies: list[SlowCopy]) -> None:
    known, scale = ScaleBound(), torch.tensor(2.0**16)
    known.set(scale, 2.0**16)
    scale.fill_(4.0)
    assert known.may_be_below_one(scale)
    copies[0].arrived = True
    assert not known.may_be_below_one(scale)


def test_another_tensor_in_place_of_the_scale_is_unknown(copies: list[SlowCopy]) -> None:
    known, scale, other = ScaleBound(), torch.tensor(2.0**16), torch.tensor(0.5)
    known.set(scale, 2.0**16)
    assert known.may_be_below_one(other)
    assert [copy.value for copy in copies] == [0.5]


def test_scale_of_exactly_one_is_not_below_one() -> None:
    known, scale = ScaleBound(), torch.tensor(1.0)
    known.set(scale, 1.0)
    assert not known.may_be_below_one(scale)
