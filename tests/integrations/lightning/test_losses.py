"""Losses that are not finite under Lightning: a policy keeps its scale, as status and metrics say."""

from typing import Any

import pytest
import torch
from tests.integrations.lightning.runs import KINDS, L, Regression, fit, ours, scaler_in
from torch import Tensor, nn

from gradscale import Status
from gradscale.integrations.lightning import FabricMixedPrecision, MixedPrecision

POLICIES = ["auto", "dynamic:init_scale=1024", "histogram:init_scale=1024", "logmax"]
BAD = (1, 2, 3)
"""The last three of four batches."""


class BadLosses(Regression):
    """Its loss is NaN at some batches; keeps the scale before every batch."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.scales: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        self.scales.append(scaler_in(self.trainer.precision_plugin).get_scale())  # type: ignore[arg-type]
        loss = super().training_step(batch, index)
        return loss * torch.nan if index in BAD and loss is not None else loss


@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 1.0}], ids=["", "clip"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_three_nan_losses_leave_the_scale_of_a_trainer_as_it_is(policy: str, kind: str, clip: dict[str, Any]) -> None:
    module, plugin = BadLosses(kind), MixedPrecision(policy)
    trainer = fit(module, plugin, **clip)
    scaler = scaler_in(plugin)
    assert scaler.get_scale() == module.scales[1]
    assert scaler.last is not None
    assert scaler.last.status() is Status.NONFINITE_LOSS
    assert trainer.callback_metrics["gradscale/skipped"] == 3


def test_torchs_rule_in_a_trainer_backs_off() -> None:
    module, plugin = BadLosses("foreach"), ours()
    fit(module, plugin)
    assert scaler_in(plugin).get_scale() == 2.0**7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_three_nan_losses_leave_the_scale_of_fabric_as_it_is(policy: str, kind: str) -> None:
    plugin = FabricMixedPrecision(policy)
    fabric = L.Fabric(accelerator="cpu", plugins=[plugin])
    net = nn.Linear(8, 1)
    how: dict[str, Any] = {kind: True}
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, **how))
    scales, scaler = [], plugin.scaler
    assert scaler is not None
    for index in range(4):
        optimizer.zero_grad()
        fabric.backward(model(torch.ones(2, 8)).float().square().mean() * (torch.nan if index in BAD else 1.0))
        optimizer.step()
        scales.append(scaler.get_scale())
    assert scales == scales[:1] * 4
    assert scaler.last is not None
    assert scaler.last.status() is Status.NONFINITE_LOSS
