"""What goes wrong, without an error or with one, in Lightning's own plugin and torch's scaler: each with both."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.lightning.runs import L, LightningMixedPrecision, Regression, fit, ours, theirs, weights_of
from tests.torch.helpers import poison
from torch import Tensor, nn

from gradscale.integrations.lightning import FabricMixedPrecision, MixedPrecision
from gradscale.torch import GradScaler, LossScaler, ShardedGradScaler


def test_fp16_on_a_cpu_is_not_bf16() -> None:
    flag, plugin = Regression(), Regression()
    fit(flag, None, precision="16-mixed")
    assert flag.types == {torch.bfloat16}, "Lightning's own"
    fit(plugin, MixedPrecision())
    assert plugin.types == {torch.float16}


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_with_a_fused_optimizer_is_not_refused(algorithm: str) -> None:
    clip: dict[str, Any] = {"gradient_clip_val": 0.125, "gradient_clip_algorithm": algorithm}
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Regression("fused"), theirs(), **clip)
    fused, unfused, lightnings = Regression("fused"), Regression(), Regression()
    fit(fused, ours(), **clip)
    fit(unfused, ours(), **clip)
    fit(lightnings, theirs(), **clip)
    for module in (fused, unfused):
        torch.testing.assert_close(weights_of(module), weights_of(lightnings), rtol=1e-4, atol=1e-6)
    unclipped = Regression()
    fit(unclipped, ours())
    assert max(abs(a - b) for a, b in zip(weights_of(unclipped), weights_of(unfused), strict=True)) > 1e-4


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_skipped_step_does_not_advance_the_schedule(kind: str) -> None:
    lightnings, module = (Regression(kind, bad=(1,), interval="step") for _ in range(2))
    fit(lightnings, theirs())
    assert lightnings.rates == [2.0**-6, 2.0**-7, 2.0**-8, 2.0**-9], "Lightning's own: 4 advances for 3 updates"
    fit(module, ours())
    assert module.rates == [2.0**-6, 2.0**-6, 2.0**-7, 2.0**-8]


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_skipped_step_is_not_invisible(kind: str) -> None:
    trainer = fit(Regression(kind, bad=(1,)), theirs())
    assert not trainer.callback_metrics, "Lightning's own"
    trainer = fit(Regression(kind, bad=(1,)), ours())
    assert trainer.callback_metrics["gradscale/skipped"] == 1
    assert trainer.callback_metrics["gradscale/applied"] == 3
    assert trainer.global_step == 4, "as in Lightning, a step that was tried"


class GradientsSeen(Regression):
    """Keeps the norm that `on_before_optimizer_step` sees."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.norms.append(float(torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]))))


def test_hook_before_the_step_of_a_fused_optimizer_does_not_see_scaled_gradients() -> None:
    unfused, lightnings, module = GradientsSeen("foreach"), GradientsSeen("fused"), GradientsSeen("fused")
    fit(unfused, theirs())
    fit(lightnings, theirs())
    assert lightnings.norms[0] == pytest.approx(2**10 * unfused.norms[0]), "Lightning's own"
    fit(module, ours())
    assert module.norms == pytest.approx(unfused.norms, rel=1e-2)


class TwoOptimizers(L.LightningModule):
    """Two parameters with an optimizer each, stepped by hand on one backward pass; the first overflows at once."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = (nn.Parameter(torch.ones(2)) for _ in range(2))
        self.weights: list[list[float]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward((self.first + self.second).sum())
        if index == 0:
            poison(self.first)
        for optimizer in optimizers:
            optimizer.step()
        self.weights.append([self.first[1].item(), self.second[1].item()])

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([each], lr=1.0) for each in (self.first, self.second)]


def test_second_optimizer_of_a_backward_pass_is_not_unscaled_by_another_scale() -> None:
    lightnings, module = TwoOptimizers(), TwoOptimizers()
    fit(lightnings, theirs())
    assert lightnings.weights[0] == [1.0, -1.0], "Lightning's own: twice the gradient, after a skip"
    fit(module, ours())
    assert module.weights == [[1.0, 0.0], [0.0, -1.0], [-1.0, -2.0], [-2.0, -3.0]]


def test_second_optimizer_of_a_backward_pass_is_not_unscaled_by_another_scale_after_growth() -> None:
    class Clean(TwoOptimizers):
        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            super().training_step(batch, index + 1)  # without the overflow

    grows = {"init_scale": 8.0, "growth_interval": 1}
    lightnings, module = Clean(), Clean()
    fit(lightnings, LightningMixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **grows)), batches=1)
    assert lightnings.weights == [[0.0, 0.5]], "Lightning's own: half the gradient, after growth"
    fit(module, MixedPrecision(scaler=GradScaler("cpu", **grows)), batches=1)
    assert module.weights == [[0.0, 0.0]]


class ByLossScaler(L.LightningModule):
    """Steps by hand with a `LossScaler` of its own, without a precision plugin; the second step overflows."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net, self.fused = nn.Linear(8, 1), fused
        self.scaler = LossScaler(self.net, "torch:init_scale=1024.0")
        self.skips: list[bool] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.net(batch[0])
        self.scaler.backward(nn.functional.mse_loss(out.float(), batch[1]))
        if index == 1:
            poison(self.net.weight)
        self.skips.append(self.scaler.step(optimizer, clip_norm=1.0).skipped())
        optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2.0**-5, fused=self.fused)


@pytest.mark.parametrize("fused", [False, True])
def test_loss_scaler_in_manual_optimization_works(fused: bool) -> None:
    module = ByLossScaler(fused)
    fit(module, None, max_epochs=2)
    assert module.skips == [False, True, False, False] * 2
    assert all(map(torch.isfinite, map(torch.sum, module.parameters())))
    assert module.scaler.metrics()["applied"] == 6


class ClipsByHand(L.LightningModule):
    """Clips in manual optimization, as Lightning's documentation shows; the gradient is 3, and the bound 2."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight, self.fused = nn.Parameter(torch.ones(1)), fused

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward((3 * self.weight).sum())
        self.clip_gradients(optimizer, gradient_clip_val=2.0, gradient_clip_algorithm="norm")
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], lr=1.0, fused=self.fused)


@pytest.mark.parametrize("fused", [False, True])
def test_clip_in_manual_optimization_does_not_clip_scaled_gradients(fused: bool) -> None:
    lightnings, module = ClipsByHand(fused=False), ClipsByHand(fused)
    fit(lightnings, theirs(), batches=1)
    assert lightnings.weight.item() == pytest.approx(1 - 2 / 2**10), "Lightning's own: the scaled gradient is 2"
    fit(module, ours(), batches=1)
    assert module.weight.item() == pytest.approx(-1.0, rel=1e-5)


def test_fabric_save_does_not_omit_the_scaler(tmp_path: Path) -> None:
    def saved_by(plugin: Any) -> dict[str, Any]:
        fabric = L.Fabric(accelerator="cpu", plugins=[plugin])
        model = nn.Linear(2, 1)
        module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        fabric.backward(module(torch.ones(1, 2)).sum())
        optimizer.step()
        fabric.save(tmp_path / "run.ckpt", {"model": module, "optimizer": optimizer})
        return torch.load(tmp_path / "run.ckpt", weights_only=True)

    from lightning.fabric.plugins.precision import MixedPrecision as LightningFabricMixedPrecision

    plugin = FabricMixedPrecision()
    assert plugin.scaler is not None
    assert saved_by(LightningFabricMixedPrecision("16-mixed", "cpu")).keys() == {"model", "optimizer"}, (
        "Lightning's own"
    )
    assert saved_by(plugin)["MixedPrecision"] == plugin.scaler.state_dict()


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled, but CUDA is not available")
def test_scaler_for_fsdp1_can_be_set() -> None:
    from lightning.pytorch.plugins.precision import FSDPPrecision

    scaler: Any = ShardedGradScaler("cpu")
    with pytest.raises(ValueError, match="does not use a scaler"):
        FSDPPrecision("16-mixed", scaler=scaler)  # Lightning's own: it compares an attribute that is not set yet
    plugin = FSDPPrecision("16-mixed", scaler=None)
    plugin.scaler = scaler
    assert plugin.state_dict() == scaler.state_dict()


def test_lightnings_plugin_still_takes_the_drop_in() -> None:
    module = Regression(bad=(1,))
    fit(module, LightningMixedPrecision("16-mixed", "cpu", GradScaler("cpu")))
    assert module.types == {torch.float16}
