"""What weights, gradients and outputs of layers look like at some of the steps of a Keras `fit`, on any backend."""

import keras
import numpy as np
from sklearn.datasets import load_digits

from gradscale.keras import Watch, precision

keras.utils.set_random_seed(0)
digits = load_digits()
pixels, labels = (digits.data / 16).astype(np.float32), digits.target

half = precision.set("mixed_float16")
layers = keras.layers
model = keras.Sequential(
    [
        layers.Input((64,)),
        layers.Dense(128, activation="gelu", name="hidden"),
        layers.Dense(10, dtype="float32", name="logits"),
    ]
)
model.compile(
    optimizer=half.optimizer(keras.optimizers.Adam(3e-3)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)

# Steps 0 and 50 are run without compilation, and read. Outputs of layers are those of the batch given here.
watched = Watch(every=50, batch=pixels[:64])
history = model.fit(pixels, labels, batch_size=64, epochs=3, verbose=2, callbacks=[watched])

print(watched.table())
# Gradients are unscaled, whatever the scale was: `row.scale` says at which they passed through FP16.
gradients = [row for row in watched.rows() if row.kind == "weight_grad"]
worst = max(gradients, key=lambda row: row.formats["FP16"].flushed)
print(f"most flushed: {worst.name} at step {worst.step}, {worst.formats['FP16'].flushed:.2%} at scale {worst.scale:g}")

losses, state = history.history["loss"], model.optimizer.state
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", end=", ")
print(f"skipped {state.skipped} of {state.applied + state.skipped} steps, scale {state.scale:g}")
