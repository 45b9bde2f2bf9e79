"""Keras's `fit` in FP16: one line around the optimizer, on any backend. KERAS_BACKEND chooses it."""

import keras
import numpy as np
from sklearn.datasets import load_digits

from gradscale.keras import ScaleMonitor, precision

keras.utils.set_random_seed(0)
digits = load_digits()
images = (digits.data / 16).astype(np.float32).reshape(-1, 8, 8, 1)
labels = digits.target

# Layers compute in FP16 and keep float32 weights; `half.optimizer` scales the loss, and unscales and checks the
# gradients. With "mixed_bfloat16" or "float32" here, the same program runs without scaling.
half = precision.set("mixed_float16")

layers = keras.layers
model = keras.Sequential(
    [
        layers.Input((8, 8, 1)),
        layers.Conv2D(16, 3, activation="relu"),
        layers.Conv2D(16, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(10, dtype="float32"),  # logits in float32, as Keras advises
    ]
)
model.compile(
    optimizer=half.optimizer(keras.optimizers.Adam(3e-3, global_clipnorm=1.0)),  # clips unscaled gradients
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    jit_compile=keras.config.backend() == "jax",
)

monitor = ScaleMonitor(every=10)  # shows the scale and the skips in the progress bar
history = model.fit(images, labels, batch_size=64, epochs=4, verbose=2, callbacks=[monitor])

losses, last = history.history["loss"], monitor.rows[-1]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", end=", ")
print(f"skipped {last.skipped} of {last.step} steps, scale {last.scale:g}")
