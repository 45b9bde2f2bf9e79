"""Edits of unscaled gradients inside `unscaled` must not change the sizes that the policy sees."""

import pytest
import torch
from torch import nn

from gradscale import Headroom, Histogram, Policy
from gradscale.torch import LossScaler

pytestmark = pytest.mark.usefixtures("either_way")


def scales(edit_factor: float, policy: Policy | None = None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = LossScaler(model, policy or Headroom())
    seen: list[float] = []
    for _ in range(10):
        scaler.backward(model(torch.ones(8, 4)).square().mean())
        with scaler.unscaled(optimizer):
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad *= edit_factor
        scaler.step(optimizer)
        optimizer.zero_grad()
        seen.append(float(scaler.loss_scale))
    return seen


def test_clipping_inside_unscaled_does_not_raise_the_scale() -> None:
    assert scales(edit_factor=1e-6) == scales(edit_factor=1.0)


def test_noise_inside_unscaled_does_not_lower_the_scale() -> None:
    assert scales(edit_factor=1e6) == scales(edit_factor=1.0)


def test_edits_inside_unscaled_do_not_change_the_share_above_the_edge() -> None:
    policy = Histogram(init_scale=2.0**14, period=2)
    plain = scales(edit_factor=1.0, policy=policy)
    assert len(set(plain)) > 1
    assert scales(edit_factor=1e-6, policy=policy) == plain
    assert scales(edit_factor=1e6, policy=policy) == plain
