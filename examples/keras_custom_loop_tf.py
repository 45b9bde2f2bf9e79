"""A custom loop on TensorFlow: `tf.GradientTape`, inside a `tf.function`."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from gradscale import Dynamic
from gradscale.keras import LossScaleOptimizer

STEPS = 200

keras.utils.set_random_seed(0)
digits = load_digits()
pixels = (digits.data / 16).astype(np.float32)
labels = digits.target

keras.config.set_dtype_policy("mixed_float16")
layers = keras.layers
model = keras.Sequential([layers.Input((64,)), layers.Dense(128, "gelu"), layers.Dense(10, dtype="float32")])
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = LossScaleOptimizer(keras.optimizers.Adam(3e-3, global_clipnorm=1.0), policy=Dynamic())
optimizer.build(model.trainable_variables)


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
        scaled_loss = optimizer.scale_loss(loss)
    grads = tape.gradient(scaled_loss, model.trainable_variables)
    # Unscales, checks, applies or skips, and updates the scale. A loss that is not finite leaves the scale.
    result = optimizer.apply_if_finite(grads, model.trainable_variables, loss=loss)
    return loss, result


losses, rng = [], np.random.default_rng(0)
for _ in range(STEPS):
    batch = rng.integers(len(pixels), size=64)
    loss, result = step(pixels[batch], labels[batch])
    if result.skipped():
        print("skipped:", ", ".join(f"{culprit.name} ({culprit.kind})" for culprit in result.culprits()))
    losses.append(float(loss))

state = optimizer.state
print(f"loss {losses[0]:.3f} -> {np.mean(losses[-20:]):.3f}", end=", ")
print(f"skipped {state.skipped} of {STEPS} steps, scale {state.scale:g}")
