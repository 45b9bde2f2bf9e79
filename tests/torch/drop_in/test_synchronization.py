"""A fused step of the drop-in reads nothing; test_waits.py counts what a device waits for."""

from typing import Any

import pytest
import torch
from tests.torch.drop_in.helpers import OURS, HostReads, batches, linear_pair
from tests.torch.helpers import poison
from torch import nn

from gradscale import Headroom


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


@pytest.mark.parametrize("policy", [Headroom()])
def test_fused_step_under_a_policy_never_synchronizes(policy: Any) -> None:
    assert own_reads(OURS, fused=True, policy=policy) == 0
    assert own_reads(OURS, fused=True, hysteresis=2) == 0
