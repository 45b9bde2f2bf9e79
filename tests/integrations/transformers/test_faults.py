"""Faults of Transformers with torch's scaler that nothing reports, each beside the same run with `install`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.transformers.tiny import ours, torchs, trainer_of


def test_fp16_on_a_cpu_is_silently_float32_without_a_scaler(tmp_path: Path) -> None:
    kinds: dict[str, set[torch.dtype]] = {"torch": set(), "gradscale": set()}
    for name, place in (("torch", lambda trainer: None), ("gradscale", ours())):
        trainer = trainer_of(tmp_path, place, max_steps=1)
        trainer.model.lm_head.register_forward_hook(lambda module, args, out, name=name: kinds[name].add(out.dtype))
        trainer.train()
    assert kinds == {"torch": {torch.float32}, "gradscale": {torch.float16}}


@pytest.mark.parametrize(
    ("place", "held"), [(torchs, False), (ours(), True)], ids=["torch's, silently not held", "gradscale's"]
)
def test_schedule_at_a_skipped_step_of_the_default_fused_optimizer(
    place: Callable[..., Any], held: bool, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, place, bad_steps=[1], max_steps=4)
    trainer.train()
    assert trainer.optimizer.optimizer.defaults["fused"]
    rates = trainer.overflow.rates
    assert (rates[2] == rates[1]) is held
    assert trainer.lr_scheduler.last_epoch == (3 if held else 4)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_schedule_is_held_whatever_the_optimizer(optim: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ours(), bad_steps=[1, 2], max_steps=5, optim=optim)
    trainer.train()
    rates = trainer.overflow.rates
    assert rates[1] == rates[2] == rates[3] > rates[4]
