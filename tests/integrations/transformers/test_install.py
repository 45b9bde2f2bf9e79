"""What `install` takes and refuses."""

from pathlib import Path
from typing import Any

import pytest
from tests.integrations.transformers.tiny import gpt2, ours, trainer_of
from transformers import Trainer

from gradscale.integrations.transformers import install
from gradscale.recording.form import read_line
from gradscale.torch import GradScaler


def nothing(trainer: Trainer) -> None:
    """Leaves a trainer as it is."""


def test_scaler_is_returned_and_is_the_accelerators(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, nothing)
    scaler = install(trainer)
    assert type(scaler) is GradScaler
    assert trainer.accelerator.scaler is scaler
    assert isinstance(trainer, Trainer)
    assert type(trainer).__name__ == "Trainer"
    assert repr(scaler).startswith("GradScaler(Headroom()")


def test_trainer_that_does_not_train_in_fp16_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, nothing, fp16=False, bf16=True)
    with pytest.raises(ValueError, match=r"`TrainingArguments\(fp16=True\)`. Received: fp16=False, bf16=True"):
        install(trainer)


def test_trainer_that_has_trained_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, nothing, max_steps=1)
    trainer.train()
    with pytest.raises(RuntimeError, match="Prepared already: AdamW"):
        install(trainer)


def test_second_install_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ours())
    with pytest.raises(RuntimeError, match="was called on this accelerator before"):
        install(trainer)


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes a `transformers.Trainer`. Received: GPT2LMHeadModel"):
        install(gpt2())  # type: ignore[arg-type]


def test_trainer_that_was_evaluated_before_trains_in_fp16(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, nothing, max_steps=1)
    trainer.evaluate(trainer.train_dataset)
    install(trainer)
    kinds = []
    trainer.model.lm_head.register_forward_hook(lambda module, args, out: kinds.append(str(out.dtype)))
    trainer.train()
    assert set(kinds) == {"torch.float16"}


def test_a_run_is_recorded(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ours(record=tmp_path / "run.jsonl"), bad_steps=(2,))
    trainer.train()
    trainer.accelerator.scaler._memory.recorder.close()
    lines: list[Any] = [read_line(line) for line in (tmp_path / "run.jsonl").read_bytes().splitlines()][1:]
    assert [line.status for line in lines].count("overflow") == 1
    assert [line.step for line in lines] == list(range(8))
