"""A custom loop on torch: `backward`, and Keras's optimizer on its gradients."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from sklearn.datasets import load_digits

from gradscale import Dynamic
from gradscale.keras import LossScaleOptimizer

STEPS = 200

keras.utils.set_random_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)

keras.config.set_dtype_policy("mixed_float16")
layers = keras.layers
model = keras.Sequential([layers.Input((64,)), layers.Dense(128, "gelu"), layers.Dense(10, dtype="float32")])
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = LossScaleOptimizer(keras.optimizers.Adam(3e-3, global_clipnorm=1.0), policy=Dynamic())
optimizer.build(model.trainable_variables)

losses, generator = [], torch.Generator().manual_seed(0)
for _ in range(STEPS):
    batch = torch.randint(len(pixels), (64,), generator=generator)
    model.zero_grad()
    loss = loss_of(labels[batch], model(pixels[batch], training=True))
    optimizer.scale_loss(loss).backward()
    grads = [variable.value.grad for variable in model.trainable_variables]
    with torch.no_grad():
        # Unscales, checks, applies or skips, and updates the scale.
        result = optimizer.apply_if_finite(grads, model.trainable_variables, loss=loss)
    if result.skipped():
        print("skipped:", ", ".join(f"{culprit.name} ({culprit.kind})" for culprit in result.culprits()))
    losses.append(float(loss.detach()))

state = optimizer.state
print(f"loss {losses[0]:.3f} -> {np.mean(losses[-20:]):.3f}", end=", ")
print(f"skipped {state.skipped} of {STEPS} steps, scale {state.scale:g}")
