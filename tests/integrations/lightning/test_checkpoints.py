"""Checkpoints of the Trainer: the scaler is in them, and a resumed run goes on bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.lightning.runs import Regression, fit, ours, theirs, weights_of

from gradscale import CheckOnly, Headroom
from gradscale.integrations.lightning import MixedPrecision
from gradscale.torch import GradScaler


def plugins() -> dict[str, Any]:
    return {
        "auto": lambda: MixedPrecision(),
        "torch's rule": ours,
        "hysteresis": lambda: MixedPrecision(
            scaler=GradScaler("cpu", init_scale=256.0, growth_interval=3, hysteresis=2)
        ),
    }


@pytest.mark.parametrize("kind", ["foreach", "fused"])
@pytest.mark.parametrize("name", plugins())
def test_resumed_run_is_bit_exact(name: str, kind: str, tmp_path: Path) -> None:
    def trained(plugin: MixedPrecision, epochs: int, ckpt_path: Path | None = None, bad: tuple[int, ...] = ()) -> Any:
        module = Regression(kind, bad, interval="step")
        trainer = fit(module, plugin, max_epochs=epochs, ckpt_path=ckpt_path, gradient_clip_val=1.0)
        return trainer, module

    _, whole = trained(end := plugins()[name](), 2, bad=(1, 6))
    half, _ = trained(first := plugins()[name](), 1, bad=(1,))
    half.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["MixedPrecision"]
    assert saved == first.state_dict()
    _, rest = trained(second := plugins()[name](), 2, tmp_path / "run.ckpt", bad=(2,))
    assert weights_of(rest) == weights_of(whole)
    assert second.state_dict() == end.state_dict()
    assert rest.rates == whole.rates[4:]


def test_checkpoint_of_a_run_with_torchs_scaler_is_taken_over(tmp_path: Path) -> None:
    trainer = fit(Regression(), theirs())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    plugin = MixedPrecision(scaler=GradScaler("cpu"))
    fit(Regression(), plugin, max_epochs=2, ckpt_path=tmp_path / "run.ckpt")
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 2.0**10 * 4, "grown after 4 steps before the checkpoint, and 4 after it"
    assert plugin.scaler.get_growth_interval() == 4


def test_lightnings_plugin_loads_what_ours_has_saved(tmp_path: Path) -> None:
    trainer = fit(Regression(), ours())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    plugin = theirs()
    fit(Regression(), plugin, max_epochs=2, ckpt_path=tmp_path / "run.ckpt")
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 2.0**10 * 4


def test_schedules_that_must_still_be_held_are_saved() -> None:
    plugin = ours()
    plugin._schedules.state = lambda: [1]  # type: ignore[method-assign]
    saved = plugin.state_dict()
    assert saved["held_schedules"] == [1]
    fresh = ours()
    fresh.load_state_dict(saved)
    assert "held_schedules" not in fresh.state_dict()


def test_a_run_in_fp16_that_is_resumed_from_one_in_bf16_scales(tmp_path: Path) -> None:
    checks = MixedPrecision(CheckOnly(), precision="bf16-mixed")
    fit(Regression(), checks, max_epochs=1).save_checkpoint(tmp_path / "bf16.ckpt")
    fit(Regression(), plugin := MixedPrecision(), max_epochs=2, ckpt_path=tmp_path / "bf16.ckpt")
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() > 1.0
    assert plugin.scaler._rule.policy == Headroom()
