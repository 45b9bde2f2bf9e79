"""Trainers of TRL with an installed scaler: tiny models and a tokenizer made here, FP16 on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.transformers.tiny import Overflow, gpt2

from gradscale.integrations.transformers import install

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

LETTERS = "abcdefghijklmnopqrstuvwxyz"
COMMON: dict[str, Any] = {
    "fp16": True,
    "use_cpu": True,
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


def tokenizer() -> Any:
    """Returns a tokenizer of single letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *LETTERS]
    letters = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>")


def rows_of(trainer: Any) -> list[dict[str, float]]:
    return [row for row in trainer.state.log_history if "loss" in row]


def test_dpo_trains_in_fp16_with_its_reference_model_and_holds_the_schedule(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list([{"prompt": "a b c ", "chosen": "d e f", "rejected": "p o n"}] * 16)
    overflow = Overflow(bad_steps=[1])
    trainer = trl.DPOTrainer(
        gpt2(),
        ref_model=gpt2(),
        args=trl.DPOConfig(str(tmp_path), **COMMON),
        train_dataset=data,
        processing_class=tokenizer(),
        callbacks=[overflow],
    )
    kinds: set[torch.dtype] = set()
    for model in (trainer.model, trainer.ref_model):
        model.transformer.h[0].attn.c_attn.register_forward_hook(lambda module, args, out: kinds.add(out.dtype))
    install(trainer, "torch:init_scale=1024.0")
    trainer.train()
    assert kinds == {torch.float16}
    rows = rows_of(trainer)
    assert [row["gradscale/skipped"] for row in rows] == [0, 1, 1, 1]
    assert overflow.rates[1] == overflow.rates[2] > overflow.rates[3]
    assert rows[3]["loss"] < rows[0]["loss"]
    assert rows[3]["rewards/margins"] > 0


def test_grpo_generates_and_trains_in_fp16(tmp_path: Path) -> None:
    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(map(ord, completion)) % 7) for completion in completions]

    data = datasets.Dataset.from_list([{"prompt": "a b c "}] * 16)
    trainer = trl.GRPOTrainer(
        gpt2(),
        reward_funcs=reward,
        args=trl.GRPOConfig(str(tmp_path), num_generations=4, max_completion_length=4, **COMMON),
        train_dataset=data,
        processing_class=tokenizer(),
    )
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    scaler = install(trainer, "torch:init_scale=1024.0")
    trainer.train()
    assert scaler.metrics()["applied"] == 4
    assert all(row["gradscale/scale"] == 1024.0 for row in rows_of(trainer))
    assert not any(map(torch.equal, before, trainer.model.parameters()))
