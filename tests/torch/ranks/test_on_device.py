"""Ranks whose rule runs on the device: the facts, scales and weights of ranks whose host runs it.

The ranks take the CPU for an accelerator, whose numbers the host may not look at; the operators are numpy's there.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.helpers import INF, NAN, loss_of, poison, small_model
from tests.torch.ranks.gpt import GPT, ROUNDED, batch_of
from tests.torch.ranks.launch import run_ranks
from tests.torch.ranks.layouts import LAYOUTS, needs_sharding
from tests.torch.versions import SHARDS_ON_CPU

from gradscale import Dynamic, Histogram, Policy
from gradscale.policies.headroom import Headroom
from gradscale.torch import GradScaler, LossScaler, host
from gradscale.torch.step import on_device

CASES: list[tuple[str, Policy, float | None]] = [
    ("DDP on 2", Dynamic(init_scale=64.0, growth_interval=2), None),
    ("DDP on 2", Headroom(), 0.5),
    ("FSDP2 on 2", Dynamic(init_scale=64.0, growth_interval=2), 0.5),
    ("FSDP2 on 2", Headroom(), None),
    ("FSDP2 on 2", Histogram(period=2), None),
    ("HSDP on 2x2", Headroom(), 0.5),
    ("FSDP2 x TP on 2x2", Headroom(), 0.5),
]
CASES = [case for case in CASES if SHARDS_ON_CPU or not needs_sharding(case[0])]
BAD_LOSS, BAD_BACKWARD, STEPS = 3, 5, 10


STEP: Any = on_device  # whose name of another module is replaced


def on_ranks(world: int) -> list[list[dict[str, Any]]]:
    """Returns what a rank has seen in every case of so many ranks: on the device, and on the host."""
    host.in_host_memory = lambda device: False  # type: ignore[assignment]
    has_kernel, found = STEP.refusal, []
    for name, policy, clip in CASES:
        if LAYOUTS[name].ranks == world:
            for drop_in in (False, True):
                pair = []
                for on_host in (False, True):
                    STEP.refusal = (lambda policy, device: "no kernel") if on_host else has_kernel
                    pair.append(trained(name, policy, clip, drop_in))
                found.append(pair)
    return found


def trained(name: str, policy: Policy, clip: float | None, drop_in: bool) -> dict[str, Any]:
    """Returns what a rank has seen of ten steps, of which one rank spoils two."""
    layout, rank = LAYOUTS[name], dist.get_rank()
    torch.manual_seed(0)
    model = layout.spread(GPT(ROUNDED))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-10, fused=True)
    scaler: Any = GradScaler("cpu", policy=policy) if drop_in else LossScaler(model, policy)
    status: list[tuple[str, float]] = []
    for step in range(STEPS):
        inputs, targets = batch_of(step, layout.part(rank), layout.parts)
        loss = ROUNDED.loss(model(inputs), targets)
        if step == BAD_LOSS and rank == 1:
            loss = loss.detach() * NAN + loss  # not finite, and its gradients are
        if step == BAD_BACKWARD and rank == 0:
            loss.register_hook(lambda grad: grad * INF)
        scaler.scale(loss).backward()
        scaler.step(optimizer, clip_norm=clip)
        if drop_in:
            scaler.update()
        optimizer.zero_grad()
        status.append((str(scaler.last.status()), float(scaler.last.next_scale)))
    weights = [getattr(each, "to_local", lambda each=each: each)().detach() for each in model.parameters()]
    return {"status": status, "device": scaler._rule.ahead is not None, "weights": [w.tolist() for w in weights]}


@pytest.mark.parametrize("world", sorted({LAYOUTS[name].ranks for name, _, _ in CASES}))
def test_ranks_whose_rule_runs_on_the_device_decide_as_those_whose_host_runs_it(world: int, tmp_path: Path) -> None:
    by_rank = run_ranks(world, on_ranks, world, folder=tmp_path / "ranks")
    for of_all in zip(*by_rank, strict=True):
        for ours, theirs in of_all:
            assert ours["device"]
            assert not theirs["device"]
            assert ours["status"] == theirs["status"] == of_all[0][0]["status"]
            assert [status for status, _ in ours["status"]].count("applied") < STEPS
            for one, other in zip(ours["weights"], theirs["weights"], strict=True):
                assert torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-4)


def scales_of_the_drop_in(several: bool) -> list[float]:
    """Returns the scales of plain gradients that are reduced, where the loss of one rank alone is not finite."""
    host.in_host_memory = lambda device: False  # type: ignore[assignment]
    model = small_model()
    groups = [[each] for each in model.parameters()] if several else [list(model.parameters())]
    optimizers = [torch.optim.AdamW(group, fused=True) for group in groups]
    scaler, scales = GradScaler("cpu", policy=Dynamic(init_scale=64.0), on_stuck="ignore"), list[float]()
    for step in range(3):
        for part in range(1 if several else 2):
            loss = loss_of(model, part)
            scaler.scale(loss * NAN if step == 1 and dist.get_rank() == 1 else loss).backward()
        for each in model.parameters():
            dist.all_reduce(each.grad)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        assert scaler._rule.ahead is not None
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("several", [False, True])
def test_a_loss_of_one_rank_alone_does_not_part_the_scales_of_the_drop_in(several: bool, tmp_path: Path) -> None:
    assert run_ranks(2, scales_of_the_drop_in, several, folder=tmp_path / "ranks") == [[64.0, 32.0, 32.0]] * 2


def steps_without_gradients(scale: float) -> list[float]:
    """Returns the scales of two ranks, of which one has no gradients, and the host of that one runs its rule."""
    host.in_host_memory = lambda device: False  # type: ignore[assignment]
    model, leaf, scales = small_model(), torch.zeros((), requires_grad=True), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = LossScaler(model, Dynamic(init_scale=scale, min_scale=2.0**-10))
    for step in range(3):
        scaler.backward(leaf + 1.0 if dist.get_rank() else loss_of(model, step))
        if step == 1 and not dist.get_rank():
            poison(next(model.parameters()))
        scaler.step(optimizer)
        optimizer.zero_grad()
        scales.append(float(scaler.loss_scale))
    return scales


@pytest.mark.parametrize("scale", [0.5, 64.0])
def test_a_rank_without_gradients_sends_what_the_others_send(scale: float, tmp_path: Path) -> None:
    found = run_ranks(2, steps_without_gradients, scale, folder=tmp_path / "ranks")
    assert found == [[scale, scale / 2, scale / 2]] * 2


def shares_above() -> list[float]:
    """Returns the share of elements above the edge that a rank knows: on the device, and on the host."""
    host.in_host_memory = lambda device: False  # type: ignore[assignment]
    has_kernel, layout, shares = STEP.refusal, LAYOUTS["FSDP2 x TP on 2x2"], list[float]()
    for refusal in (has_kernel, lambda policy, device: "no kernel"):
        STEP.refusal = refusal
        model = layout.spread(GPT(ROUNDED))
        scaler = LossScaler(model, Histogram())
        inputs, targets = batch_of(0, layout.part(dist.get_rank()), layout.parts)
        scaler.backward(ROUNDED.loss(model(inputs), targets))
        for number, each in enumerate(model.parameters()):
            each.grad.to_local().fill_(1.0 if number % 3 else 1e9)  # type: ignore[union-attr]
        scaler.step(torch.optim.AdamW(model.parameters(), fused=True))
        facts: Any = scaler.last.facts  # type: ignore[union-attr]
        shares.append(float(facts.numbers[-1] if refusal is has_kernel else facts.seen().upper_share))
    return shares


@pytest.mark.skipif(not SHARDS_ON_CPU, reason="needs shards on the CPU")
def test_elements_that_several_ranks_hold_count_once_in_the_share_above_an_edge(tmp_path: Path) -> None:
    for ours, theirs in run_ranks(4, shares_above, folder=tmp_path / "ranks"):
        assert ours == pytest.approx(theirs, rel=1e-5)
