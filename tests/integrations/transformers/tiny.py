"""Tiny models built from configurations, their data, and trainers in FP16 on the CPU."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from gradscale.integrations.transformers import install

WORDS = 32


def gpt2() -> nn.Module:
    """Returns a GPT-2 without dropout, the same at every call."""
    torch.manual_seed(0)
    off: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    special: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    shape: dict[str, Any] = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **shape, **off, **special))


def t5() -> nn.Module:
    """Returns a T5 without dropout, the same at every call."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    special: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, dropout_rate=0.0, **shape, **special))


def counting(rows: int = 64) -> Any:
    """Returns sequences that count upwards, each from another number."""
    numbers = [[(row + place) % (WORDS - 2) + 2 for place in range(8)] for row in range(rows)]
    return [{"input_ids": ids, "labels": ids} for ids in numbers]


def ours(policy: Any = "torch:init_scale=1024.0", **kwargs: Any) -> Callable[[Trainer], Any]:
    """Returns what installs gradscale's scaler."""
    return lambda trainer: install(trainer, policy, **kwargs)


def torchs(trainer: Trainer) -> None:
    """Puts torch's scaler where Transformers has it on a GPU."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.accelerator.native_amp = True


class Overflow(TrainerCallback):
    """Makes gradients overflow before given steps, and notes the learning rate of every step."""

    def __init__(self, bad_steps: Sequence[int]) -> None:
        self.bad_steps = bad_steps
        self.rates: list[float] = []
        self.logged: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parameter = next(kwargs["model"].parameters())
        self.hook = parameter.register_hook(lambda grad: grad * torch.inf if self.bad(state) else grad)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.hook.remove()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged.append(logs)

    def bad(self, state: Any) -> bool:
        return state.global_step in self.bad_steps


def trainer_of(
    folder: Path, place: Callable[[Trainer], Any], make: Callable[[], nn.Module] = gpt2, **kwargs: Any
) -> Any:
    """Returns a trainer with a scaler in place. Keywords are of `TrainingArguments`, but for `bad_steps`."""
    bad_steps = kwargs.pop("bad_steps", ())
    defaults: dict[str, Any] = {
        "fp16": True,
        "use_cpu": True,
        "max_steps": 8,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(str(folder), **(defaults | kwargs))
    callback = Overflow(bad_steps)
    trainer: Any = Trainer(make(), arguments, train_dataset=counting(), callbacks=[callback])
    trainer.overflow = callback
    place(trainer)
    return trainer


def losses_of(trainer: Trainer) -> list[float]:
    """Returns the losses that were logged."""
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]
