"""A flax nnx CNN with BatchNorm: FP16 arithmetic, float32 parameters, and one compiled step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from gradscale.jax import Scaler, apply, value_and_grad

STEPS = 150

digits = load_digits()
images = (digits.images[..., None] / 16).astype(np.float32)
labels = digits.target


class CNN(nnx.Module):
    def __init__(self, rngs):
        half = {"dtype": jnp.float16, "rngs": rngs}  # of the arithmetic; parameters are float32 by default
        self.first = nnx.Conv(1, 16, (3, 3), **half)
        self.norm = nnx.BatchNorm(16, **half)
        self.second = nnx.Conv(16, 32, (3, 3), strides=2, **half)
        self.head = nnx.Linear(4 * 4 * 32, 10, **half)

    def __call__(self, x):
        x = nnx.relu(self.second(nnx.relu(self.norm(self.first(x)))))
        return self.head(x.reshape(len(x), -1))


graph, params, stats = nnx.split(CNN(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)
tx = optax.adamw(optax.cosine_decay_schedule(3e-3, STEPS))
opt_state, scaler = tx.init(params), Scaler()


def loss_of(params, stats, x, y):
    model = nnx.merge(graph, params, stats)
    logits = model(x).astype(jnp.float32)  # a loss is taken in float32: scaled, it does not fit FP16
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, nnx.state(model, nnx.BatchStat)


@jax.jit
def step(scaler, params, stats, opt_state, x, y):
    gradient = value_and_grad(loss_of, has_aux=True, clip_norm=1.0)  # scales, differentiates, unscales, checks, clips
    (loss, new_stats), grads, scaler, result = gradient(scaler, params, stats, x, y)
    params, opt_state = apply(tx, grads, opt_state, params, result)  # a skipped step leaves the schedule alone too
    stats = result.select(new_stats, stats)  # and the statistics of a batch that overflowed are not kept
    return scaler, params, stats, opt_state, loss


losses, rng = [], np.random.default_rng(0)
for _ in range(STEPS):
    batch = rng.integers(len(images), size=64)
    scaler, params, stats, opt_state, loss = step(scaler, params, stats, opt_state, images[batch], labels[batch])
    losses.append(loss)  # kept on the device: `float(loss)` here would synchronize at every step

metrics = scaler.metrics()
print(f"loss {losses[0]:.3f} -> {jnp.stack(losses[-20:]).mean():.3f}", end=", ")
print(f"skipped {metrics['skipped']} of {STEPS} steps, scale {metrics['scale']:g}")
