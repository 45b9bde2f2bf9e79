"""A custom loop on JAX: pure functions, and a step that is compiled as one."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from sklearn.datasets import load_digits

from gradscale import Headroom
from gradscale.keras import LossScaleOptimizer

STEPS = 200

keras.utils.set_random_seed(0)
digits = load_digits()
pixels = (digits.data / 16).astype(np.float32)
labels = digits.target

keras.config.set_dtype_policy("mixed_float16")
layers = keras.layers
model = keras.Sequential([layers.Input((64,)), layers.Dense(128, "gelu"), layers.Dense(10, dtype="float32")])
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = LossScaleOptimizer(keras.optimizers.Adam(3e-3, global_clipnorm=1.0), policy=Headroom())
optimizer.build(model.trainable_variables)


def scaled_loss(weights, others, opt_vars, x, y):
    logits, others = model.stateless_call(weights, others, x, training=True)
    loss = cross_entropy(y, logits)
    # The scale is passed in with the optimizer's variables.
    return optimizer.scale_loss(loss, opt_vars), (loss, others)


@jax.jit
def step(weights, others, opt_vars, x, y):
    grads, (loss, others) = jax.grad(scaled_loss, has_aux=True)(weights, others, opt_vars, x, y)
    # Unscales, checks, applies or skips, and updates the scale: all of it compiled, one branch around the optimizer.
    weights, opt_vars, result = optimizer.stateless_apply_if_finite(opt_vars, grads, weights, loss=loss)
    return weights, others, opt_vars, loss, result


weights = [variable.value for variable in model.trainable_variables]
others = [variable.value for variable in model.non_trainable_variables]
opt_vars = [variable.value for variable in optimizer.variables]
losses, skipped, rng = [], 0, np.random.default_rng(0)
for _ in range(STEPS):
    batch = rng.integers(len(pixels), size=64)
    weights, others, opt_vars, loss, result = step(weights, others, opt_vars, pixels[batch], labels[batch])
    skipped += result.skipped()
    losses.append(float(loss))

# Back into the model and the optimizer, to save them.
for variable, value in zip([*model.trainable_variables, *optimizer.variables], [*weights, *opt_vars], strict=True):
    variable.assign(value)

print(f"loss {losses[0]:.3f} -> {np.mean(losses[-20:]):.3f}", end=", ")
print(f"skipped {skipped} of {STEPS} steps, scale {optimizer.state.scale:g}")
