"""Trainers with an installed scaler: real training in FP16 on the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.transformers.tiny import gpt2, losses_of, ours, t5, trainer_of
from torch import nn
from transformers import TrainerCallback


@pytest.mark.parametrize("make", [gpt2, t5])
@pytest.mark.parametrize("policy", ["auto", "torch"])
def test_model_learns_in_fp16(make: Callable[[], nn.Module], policy: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ours(policy), make, max_steps=24)
    kinds: set[torch.dtype] = set()
    layer = next(each for each in trainer.model.modules() if type(each).__name__ in ("Linear", "Conv1D"))
    layer.register_forward_hook(lambda module, args, out: kinds.add(out.dtype))
    trainer.train()
    assert kinds == {torch.float16}
    losses = losses_of(trainer)
    assert losses[-1] < 0.7 * losses[0]
    assert all(parameter.dtype is torch.float32 for parameter in trainer.model.parameters())


def test_logs_and_callbacks_carry_scale_skips_and_norm(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ours(), bad_steps=[2], max_steps=4)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["gradscale/scale"] for row in rows] == [1024.0, 1024.0, 512.0, 512.0]
    assert [row["gradscale/skipped"] for row in rows] == [0, 0, 1, 1]
    assert rows[3]["gradscale/skip_rate"] == 0.25
    assert [row["gradscale/grad_norm"] for row in rows if "gradscale/grad_norm" in row] == [
        row["grad_norm"] for row in rows if row["grad_norm"] == row["grad_norm"]
    ]
    seen = trainer.overflow.logged
    assert [row["gradscale/scale"] for row in seen if "loss" in row] == [1024.0, 1024.0, 512.0, 512.0]
    assert "gradscale/scale" not in trainer.state.log_history[-1], "a summary of the run, not of a step"


def test_logs_carry_nothing_of_the_scaler_if_not_wanted(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ours(log=False), max_steps=1)
    trainer.train()
    assert not any(name.startswith("gradscale/") for row in trainer.state.log_history for name in row)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-3])
def test_logged_norm_is_of_unscaled_gradients(max_grad_norm: float, tmp_path: Path) -> None:
    norms = []
    for fp16 in (True, False):
        place = ours() if fp16 else (lambda trainer: None)
        trainer = trainer_of(tmp_path, place, fp16=fp16, max_grad_norm=max_grad_norm, max_steps=1)
        trainer.train()
        row = trainer.state.log_history[0]
        if "grad_norm" not in row:
            pytest.skip("this version of Transformers logs no norm without clipping")
        norms.append(row["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


def test_clipping_bounds_the_unscaled_gradients(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ours(), max_grad_norm=1e-3, max_steps=1, optim="sgd", learning_rate=1.0)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    moved = [new.detach() - old for new, old in zip(trainer.model.parameters(), before, strict=True)]
    assert float(nn.utils.get_total_norm(moved)) == pytest.approx(1e-3, rel=1e-2)


def test_accumulated_micro_batches_are_one_batch(tmp_path: Path) -> None:
    weights = []
    for size, steps in ((8, 1), (2, 4)):
        trainer = trainer_of(
            tmp_path, ours(), per_device_train_batch_size=size, gradient_accumulation_steps=steps, max_steps=4
        )
        trainer.train()
        weights.append(losses_of(trainer))
        assert trainer.accelerator.scaler.metrics()["applied"] == 4
    assert weights[0] == pytest.approx(weights[1], rel=1e-2)


@pytest.mark.parametrize("policy", ["auto", "dynamic:init_scale=256,growth_interval=2,hysteresis=2"])
def test_resumed_run_continues_bit_exactly(policy: str, tmp_path: Path) -> None:
    whole = trainer_of(tmp_path, ours(policy), save_strategy="steps", save_steps=4, bad_steps=[2, 5])
    whole.train()
    assert (tmp_path / "checkpoint-4" / "scaler.pt").exists()
    resumed = trainer_of(tmp_path, ours(policy), bad_steps=[2, 5])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    states = [trainer.accelerator.scaler.state_dict() for trainer in (whole, resumed)]
    assert states[0] == states[1]
    assert losses_of(whole) == losses_of(resumed)
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_second_train_goes_on_with_the_scaler(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ours(), bad_steps=[1], max_steps=2)
    trainer.train()
    trainer.train()
    assert trainer.accelerator.scaler.get_scale() == 256.0


def test_run_that_starts_again_with_a_smaller_batch_forgets_the_step_that_ran_out_of_memory(tmp_path: Path) -> None:
    class OutOfMemory(TrainerCallback):
        """Fails between clipping and the step, where Adam allocates its state."""

        steps = 0

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps += 1
            if self.steps == 2:
                raise RuntimeError("CUDA out of memory.")

    trainer = trainer_of(tmp_path, ours(), max_steps=3, auto_find_batch_size=True)
    trainer.add_callback(OutOfMemory())
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.accelerator.scaler.metrics()["applied"] == 4


def test_policy_without_a_scale_logs_the_norm_alone(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ours("none"), max_steps=1)
    trainer.train()
    row = trainer.state.log_history[0]
    assert [name for name in row if name.startswith("gradscale/")] == ["gradscale/grad_norm"]


def test_evaluation_runs_in_fp16_and_logs_no_scale(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ours(), max_steps=1)
    metrics = trainer.evaluate(trainer.train_dataset)
    assert "eval_loss" in metrics
    assert not any(name.startswith("gradscale") for name in metrics)
    trainer.train()
    assert trainer.state.log_history[-2]["gradscale/scale"] == 1024.0


def test_accelerator_that_is_built_again_has_a_scaler_too(tmp_path: Path) -> None:
    """As for each trial of a search for hyperparameters."""
    trainer = trainer_of(tmp_path, ours(), max_steps=1)
    first = trainer.accelerator.scaler
    trainer.create_accelerator_and_postprocess()
    assert trainer.accelerator.scaler is not first
    trainer.train()
    assert trainer.accelerator.scaler.metrics()["applied"] == 1


@pytest.mark.parametrize("bf16", [True, False])
def test_check_only_does_not_let_one_inf_end_a_run_without_scaling(bf16: bool, tmp_path: Path) -> None:
    finite = {}
    for name, place in (("Transformers' own", lambda trainer: None), ("gradscale's", ours("check_only"))):
        trainer = trainer_of(tmp_path, place, fp16=False, bf16=bf16, bad_steps=[1], max_steps=4)
        trainer.train()
        finite[name] = all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())
    assert finite == {"Transformers' own": False, "gradscale's": True}
    rates = trainer.overflow.rates
    assert rates[1] == rates[2] > rates[3]
    assert trainer.state.log_history[-2]["gradscale/skipped"] == 1
