"""A Trainer of Transformers in FP16: a tiny GPT-2, built from its configuration, learns to count."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gradscale.integrations.transformers import install

WORDS, STEPS = 32, 60

torch.manual_seed(0)
shape = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **shape))
sequences = [[(start + place) % WORDS for place in range(16)] for start in range(WORDS)]
dataset = [{"input_ids": ids, "labels": ids} for ids in sequences]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        fp16=True,
        use_cpu=not torch.cuda.is_available(),
        max_steps=STEPS,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=dataset)
    scaler = install(trainer)  # the only line that is new
    trainer.train()

# Every row of the logs, and what callbacks get, has the scale, the skips and the norm of unscaled gradients.
rows = [row for row in trainer.state.log_history if "loss" in row]
print(
    f"loss {rows[0]['loss']:.3f} -> {rows[-1]['loss']:.3f}, "
    f"skipped {rows[-1]['gradscale/skipped']:.0f} of {STEPS} steps, scale {rows[-1]['gradscale/scale']:g}, "
    f"gradient norm {rows[-1]['gradscale/grad_norm']:.3f}"
)
