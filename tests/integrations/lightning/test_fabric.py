"""`FabricMixedPrecision`, and `MixedPrecision`, in `lightning.Fabric`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.precision import Precision
from tests.integrations.lightning.runs import L
from tests.torch.helpers import poison
from tests.torch.short_runs import fine_tuned_model, large_loss
from torch import Tensor, nn

from gradscale import CheckOnly
from gradscale.integrations.lightning import FabricMixedPrecision, MixedPrecision
from gradscale.torch import GradScaler

HOWS = [{"foreach": True}, {"fused": True}]


class Run:
    """A model, its optimizer and a Fabric."""

    def __init__(self, plugin: Any, **how: Any) -> None:
        self.plugin, self.fabric = plugin, L.Fabric(accelerator="cpu", plugins=[plugin])
        torch.manual_seed(0)
        self.own = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(self.own.parameters(), lr=2.0**-6, **how)
        self.model, self.optimizer = self.fabric.setup(self.own, optimizer)
        self.types: set[torch.dtype] = set()
        self.own[2].register_forward_hook(lambda module, inputs, out: self.types.add(out.dtype))

    def step(self, index: int, *, bad: bool = False, **clip: Any) -> float:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(index))
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), x.sum(1, keepdim=True))
        self.fabric.backward(loss)
        if bad:
            poison(next(self.own.parameters()))
        if clip:
            self.fabric.clip_gradients(self.model, self.optimizer, error_if_nonfinite=False, **clip)
        self.optimizer.step()
        return loss.item()

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "epoch": 3}

    def numbers(self) -> list[float]:
        return [number for each in self.own.parameters() for number in each.flatten().tolist()]


def ours(**kwargs: Any) -> FabricMixedPrecision:
    return FabricMixedPrecision(scaler=GradScaler("cpu", init_scale=2.0**10, growth_interval=3), **kwargs)


@pytest.mark.parametrize("how", HOWS)
def test_training_in_fp16_on_a_cpu_learns(how: Any) -> None:
    run = Run(FabricMixedPrecision("auto"), **how)
    losses = [run.step(index, bad=index == 5) for index in range(40)]
    assert run.types == {torch.float16}
    assert losses[-1] < 0.5 * losses[0]
    assert run.plugin.metrics()["gradscale/skipped"] == 1
    assert run.plugin.scaler.last.applied


@pytest.mark.parametrize("clip", [{"max_norm": 0.125}, {"clip_val": 0.01}])
def test_clipping_with_a_fused_optimizer_works(clip: dict[str, Any]) -> None:
    from lightning.fabric.plugins.precision import MixedPrecision

    lightnings = Run(MixedPrecision("16-mixed", "cpu"), fused=True)
    with pytest.raises(NotImplementedError, match="Gradient clipping is not implemented"):
        lightnings.step(0, **clip)
    fused, unfused = Run(ours(), fused=True), Run(ours())
    for index in range(4):
        fused.step(index, bad=index == 2, **clip)
        unfused.step(index, bad=index == 2, **clip)
    torch.testing.assert_close(fused.numbers(), unfused.numbers(), rtol=1e-4, atol=1e-6)
    assert fused.plugin.metrics()["gradscale/skipped"] == 1


@pytest.mark.parametrize("how", HOWS)
def test_clip_of_the_plugin_is_that_of_clip_gradients(how: Any) -> None:
    called, folded = Run(ours(), **how), Run(ours(clip_norm=0.125), **how)
    for index in range(4):
        called.step(index, bad=index == 2, max_norm=0.125)
        folded.step(index, bad=index == 2)
    torch.testing.assert_close(called.numbers(), folded.numbers(), rtol=1e-4, atol=1e-6)
    assert folded.plugin.metrics()["gradscale/grad_norm"] > 0.125


@pytest.mark.parametrize("steps", [3, 10, 50])
@pytest.mark.parametrize("how", HOWS)
def test_short_run_loses_no_step(how: Any, steps: int) -> None:
    plugin = FabricMixedPrecision("auto")
    fabric = L.Fabric(accelerator="cpu", plugins=[plugin])
    own = fine_tuned_model()
    model, optimizer = fabric.setup(own, torch.optim.AdamW(own.parameters(), lr=1e-4, **how))
    for index in range(steps):
        optimizer.zero_grad()
        fabric.backward(large_loss(model, index))
        optimizer.step()
    assert plugin.metrics()["gradscale/applied"] == steps
    assert plugin.metrics()["gradscale/skipped"] == 0


@pytest.mark.parametrize(("retries", "skipped"), [(0, 3), (20, 0)])
@pytest.mark.parametrize("make", [FabricMixedPrecision, MixedPrecision])
def test_retries_can_be_asked_for(make: Any, retries: int, skipped: int) -> None:
    plugin = make("torch", retries=retries)
    fabric, own = L.Fabric(accelerator="cpu", plugins=[plugin]), fine_tuned_model()
    model, optimizer = fabric.setup(own, torch.optim.SGD(own.parameters(), lr=1e-6))
    for index in range(3):
        optimizer.zero_grad()
        fabric.backward(large_loss(model, index))
        optimizer.step()
    assert plugin.metrics()["gradscale/skipped"] == skipped


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    "make", [FabricMixedPrecision, MixedPrecision, ours], ids=["auto", "auto, the Trainer's plugin", "torch's rule"]
)
def test_resumed_run_is_bit_exact(make: Any, how: Any, tmp_path: Path) -> None:
    whole, first, second = (Run(make(), **how) for _ in range(3))
    for index in range(8):
        whole.step(index, bad=index in (1, 6))
    for index in range(4):
        first.step(index, bad=index == 1)
    first.fabric.save(tmp_path / "run.ckpt", first.state())
    state = second.state()
    assert second.fabric.load(tmp_path / "run.ckpt", state) == {}
    assert second.plugin.state_dict() == first.plugin.state_dict()
    for index in range(4, 8):
        second.step(index, bad=index == 6)
    assert second.numbers() == whole.numbers()
    assert second.plugin.state_dict() == whole.plugin.state_dict()


def test_scaler_that_the_user_saves_is_saved_once(tmp_path: Path) -> None:
    run, other = Run(ours()), Run(ours())
    run.step(0, bad=True)
    run.fabric.save(tmp_path / "run.ckpt", run.state() | {"scaler": run.plugin.scaler})
    assert torch.load(tmp_path / "run.ckpt", weights_only=True).keys() == {"model", "optimizer", "epoch", "scaler"}
    other.fabric.load(tmp_path / "run.ckpt", other.state() | {"scaler": other.plugin.scaler})
    assert other.plugin.scaler.get_scale() == 2.0**9


def test_state_of_torchs_scaler_is_loaded(tmp_path: Path) -> None:
    run, scaler = Run(ours()), torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    torch.save({"scaler": scaler.state_dict(), "model": run.own.state_dict()}, tmp_path / "run.ckpt")
    run.fabric.load(tmp_path / "run.ckpt", {"model": run.model, "scaler": run.plugin.scaler})
    assert run.plugin.scaler.get_scale() == 64.0


def test_whole_checkpoint_is_returned_where_nothing_is_restored(tmp_path: Path) -> None:
    run = Run(ours())
    run.step(0)
    run.fabric.save(tmp_path / "run.ckpt", run.state())
    assert run.fabric.load(tmp_path / "run.ckpt").keys() == {"model", "optimizer", "epoch", "MixedPrecision"}


def test_checkpoint_without_a_scaler_is_loaded(tmp_path: Path) -> None:
    run = Run(ours())
    torch.save({"model": run.own.state_dict(), "epoch": 1}, tmp_path / "run.ckpt")
    assert run.fabric.load(tmp_path / "run.ckpt", {"model": run.model}) == {"epoch": 1}
    assert run.plugin.scaler.get_scale() == 2.0**10


def test_other_precisions_save_what_they_did(tmp_path: Path) -> None:
    FabricMixedPrecision()
    run = Run(Precision())
    run.fabric.save(tmp_path / "run.ckpt", run.state())
    assert run.fabric.load(tmp_path / "run.ckpt").keys() == {"model", "optimizer", "epoch"}


def test_two_optimizers_on_one_backward_pass_are_unscaled_alike() -> None:
    fabric = L.Fabric(accelerator="cpu", plugins=[plugin := ours()])
    module: Any = nn.Module()
    module.first, module.second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    module.forward = lambda: (module.first + module.second).sum()
    sgd = [torch.optim.SGD([each], lr=1.0) for each in (module.first, module.second)]
    model, *optimizers = fabric.setup(module, *sgd)
    fabric.backward(model())
    poison(module.first)
    for optimizer in optimizers:
        optimizer.step()
    assert [module.first[1].item(), module.second[1].item()] == [1.0, 0.0]
    assert plugin.metrics()["gradscale/scale"] == 2.0**9


def test_arguments_of_the_backward_pass_are_passed_on() -> None:
    run = Run(ours())
    out: Tensor = run.model(torch.ones(2, 8))
    run.fabric.backward(out, torch.ones_like(out), retain_graph=True)
    run.fabric.backward(out.sum(), retain_graph=True)
    run.optimizer.step()
    assert not run.plugin.scaler.last.skipped()


def test_bf16_needs_no_scaler(tmp_path: Path) -> None:
    run = Run(FabricMixedPrecision(precision="bf16-mixed"), fused=True)
    run.step(0, max_norm=1.0)
    run.fabric.save(tmp_path / "run.ckpt", run.state())
    assert run.types == {torch.bfloat16}
    assert run.plugin.metrics() == {}


@pytest.mark.parametrize(("name", "fabrics"), [("clip_norm", "max_norm"), ("clip_value", "clip_val")])
def test_bf16_is_clipped_by_the_plugin_too(name: str, fabrics: str) -> None:
    bounds: list[dict[str, Any]] = [{name: 2.0**-10}, {}]
    run, clipped_by_fabric = (Run(FabricMixedPrecision(precision="bf16-mixed", **bound)) for bound in bounds)
    run.step(0)
    clip: dict[str, Any] = {fabrics: 2.0**-10}
    clipped_by_fabric.step(0, **clip)
    grads, expected = ([each.grad for each in own.own.parameters()] for own in (run, clipped_by_fabric))
    torch.testing.assert_close(grads, expected, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("plugin", [{"precision": "bf16-mixed"}, {"policy": "none"}], ids=str)
def test_checkpoint_of_a_run_that_scaled_nothing_is_loaded(plugin: Any, tmp_path: Path) -> None:
    before, after = Run(FabricMixedPrecision(**plugin)), Run(ours())
    before.step(0)
    before.fabric.save(tmp_path / "run.ckpt", before.state())
    after.fabric.load(tmp_path / "run.ckpt", after.state())
    assert after.plugin.scaler.get_scale() == 2.0**10


@pytest.mark.parametrize("how", HOWS)
def test_policy_without_a_scale_lets_fabric_clip(how: Any) -> None:
    run = Run(FabricMixedPrecision("none"), **how)
    run.step(0, max_norm=2.0**-10)
    norm = nn.utils.get_total_norm([each.grad for each in run.own.parameters() if each.grad is not None])
    assert norm.item() == pytest.approx(2.0**-10, rel=1e-3)


def leave_out_a_step(plugin: FabricMixedPrecision) -> Run:
    """Returns a run that has clipped, and has then decided not to step."""
    run = Run(plugin)
    run.fabric.backward(run.model(torch.ones(2, 8)).sum())
    run.fabric.clip_gradients(run.model, run.optimizer, max_norm=1.0)
    run.optimizer.zero_grad()
    return run


def test_clip_after_a_step_that_was_left_out_does_not_clip_scaled_gradients() -> None:
    run = leave_out_a_step(ours())
    with pytest.raises(RuntimeError, match="were cleared after `unscale_`, and made anew"):
        run.step(0, max_norm=1.0)
    run = leave_out_a_step(ours())
    run.plugin.scaler.update()
    run.step(0, max_norm=1.0)
    expected = Run(ours())
    expected.step(0, max_norm=1.0)
    assert run.numbers() == expected.numbers()


def test_policy_without_a_scale_has_no_metrics() -> None:
    assert FabricMixedPrecision("none").metrics() == {}


def test_lbfgs_is_refused_as_by_lightning() -> None:
    fabric = L.Fabric(accelerator="cpu", plugins=[ours()])
    own = nn.Linear(2, 1)
    _, optimizer = fabric.setup(own, torch.optim.LBFGS(own.parameters()))
    with pytest.raises(TypeError, match="LBFGS optimizer are not compatible"):
        optimizer.step(lambda: None)


def test_bound_must_be_positive() -> None:
    with pytest.raises(ValueError, match="`clip_norm` must be greater than 0"):
        FabricMixedPrecision(clip_norm=0.0)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("clip", [{}, {"max_norm": 0.125}], ids=str)
@pytest.mark.parametrize("arguments", [{}, {"device": "cpu"}], ids=str)
def test_plugin_of_the_trainer_does_the_same(arguments: Any, clip: Any, how: Any) -> None:
    policy = "auto"
    run, expected = Run(MixedPrecision(policy, **arguments), **how), Run(FabricMixedPrecision(policy), **how)
    for index in range(6):
        assert run.step(index, bad=index == 2, **clip) == expected.step(index, bad=index == 2, **clip)
    assert run.numbers() == expected.numbers()
    assert run.types == {torch.float16}
    assert run.plugin.metrics() == expected.plugin.metrics()
    assert run.plugin.metrics()["gradscale/skipped"] == 1


def test_plugin_of_a_trainer_goes_on_in_a_fabric() -> None:
    from tests.integrations.lightning.runs import Regression, fit

    plugin = MixedPrecision(scaler=GradScaler("cpu", init_scale=2.0**10))
    fit(Regression(), plugin)
    run = Run(plugin)
    assert run.step(0) > 0
    assert run.types == {torch.float16}
    assert plugin.metrics()["gradscale/applied"] == 5


def test_arguments_of_lightnings_own_class_mean_the_same() -> None:
    run = Run(FabricMixedPrecision("bf16-mixed", "cpu"))
    run.step(0)
    assert run.types == {torch.bfloat16}
    assert FabricMixedPrecision("16-mixed", "cpu", scaler := GradScaler("cpu")).scaler is scaler
    with pytest.raises(
        ValueError, match=r"Passed `MixedPrecision\(precision='bf16'\)`. Precision must be '16-mixed' or"
    ):
        FabricMixedPrecision("bf16", "cpu")


@pytest.mark.parametrize("make", [FabricMixedPrecision, MixedPrecision])
def test_context_and_errors_are_those_of_lightnings_own_class(make: Any) -> None:
    context = make("bf16-mixed", "cpu").forward_context()
    assert isinstance(context, torch.autocast)
    assert context.fast_dtype == torch.bfloat16
    with pytest.raises(ValueError, match="`precision='bf16-mixed'` does not use a scaler"):
        make("bf16-mixed", "cpu", GradScaler("cpu"))


def test_bf16_with_check_only_skips_what_is_not_finite() -> None:
    run = Run(FabricMixedPrecision(CheckOnly(), precision="bf16-mixed", clip_norm=1.0))
    run.step(0)
    before = run.numbers()
    run.step(1, bad=True)
    assert run.numbers() == before
    assert run.types == {torch.bfloat16}
    assert run.plugin.metrics()["gradscale/skipped"] == 1
    assert run.plugin.scaler.last.culprits()


def test_scaler_of_another_class_is_used_as_by_lightnings_plugin() -> None:
    from lightning.fabric.plugins.precision import MixedPrecision as LightningMixedPrecision

    scalers = [torch.amp.GradScaler("cpu", 2.0**10) for _ in range(2)]
    with pytest.warns(UserWarning, match="what Lightning's own does"):
        run = Run(FabricMixedPrecision(scaler=scalers[0]))
    lightnings = Run(LightningMixedPrecision("16-mixed", "cpu", scalers[1]))
    for index in range(3):
        assert run.step(index, bad=index == 1, max_norm=1.0) == lightnings.step(index, bad=index == 1, max_norm=1.0)
    assert run.numbers() == lightnings.numbers()
    assert run.plugin.metrics() == {}
    with (
        pytest.warns(UserWarning, match="what Lightning's own does"),
        pytest.raises(TypeError, match="`clip_norm` and"),
    ):
        FabricMixedPrecision(scaler=scalers[0], clip_norm=1.0)
