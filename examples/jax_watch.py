"""What parameters, activations and gradients of a flax model look like, counted in the compiled step."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from gradscale.jax import Scaler, Watch, apply, value_and_grad

STEPS = 200

digits = load_digits()
pixels, labels = (digits.data / 16).astype(np.float32), digits.target


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.gelu(nn.Dense(128, dtype=jnp.float16)(x))
        return nn.Dense(10, dtype=jnp.float16)(hidden)


net = Net()
params = net.init(jax.random.key(0), pixels[:1])["params"]
tx, scaler = optax.adamw(3e-3), Scaler()
opt_state, watched = tx.init(params), Watch(every=100)


def loss_of(params, x, y):
    logits, state = net.apply({"params": params}, x, capture_intermediates=True, mutable=["intermediates"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), y).mean()
    return loss, state["intermediates"]


@partial(jax.jit, static_argnames="sampled")  # compiled twice: between samples, nothing is counted
def step(scaler, params, opt_state, x, y, sampled):
    (loss, outputs), grads, scaler, result = value_and_grad(loss_of, has_aux=True)(scaler, params, x, y)
    counts = None
    if sampled:
        counts = watched.count(weights=params, outputs=outputs, weight_grads=grads, scale=result.scale)
    params, opt_state = apply(tx, grads, opt_state, params, result)
    return scaler, params, opt_state, loss, counts


losses, rng = [], np.random.default_rng(0)
for _ in range(STEPS):
    batch = rng.integers(len(pixels), size=64)
    scaler, params, opt_state, loss, counts = step(
        scaler, params, opt_state, pixels[batch], labels[batch], sampled=watched.sampled
    )
    watched.step(counts)  # at sampled steps this waits for the device
    losses.append(loss)

print(watched.table())
# Gradients are unscaled, whatever the scale was: `row.scale` says at which they passed through FP16.
gradients = [row for row in watched.rows() if row.kind == "weight_grad"]
worst = max(gradients, key=lambda row: row.formats["FP16"].flushed)
print(f"most flushed: {worst.name} at step {worst.step}, {worst.formats['FP16'].flushed:.2%} at scale {worst.scale:g}")
metrics = scaler.metrics()
print(f"loss {losses[0]:.3f} -> {jnp.stack(losses[-20:]).mean():.3f}", end=", ")
print(f"skipped {metrics['skipped']} of {STEPS} steps, scale {metrics['scale']:g}")
