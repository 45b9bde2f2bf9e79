"""Loss scaling as an optax transformation: one line around the optimizer, one factor on the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from gradscale.jax import loss_scale, scaled
from gradscale.jax.casting import get_policy

STEPS = 200

digits = load_digits()
pixels = (digits.data / 16).astype(np.float32)
labels = digits.target

keys = jax.random.split(jax.random.key(0))
params = {
    "hidden": jax.random.normal(keys[0], (64, 128)) / 8,
    "head": jax.random.normal(keys[1], (128, 10)) / 12,
}


@get_policy("params=f32,compute=f16,output=f32").wrap
def logits_of(params, x):
    return jax.nn.gelu(x @ params["hidden"]) @ params["head"]


# `scaled` goes outermost. What is inside receives unscaled gradients, and does not run in a skipped step.
tx = scaled(optax.adamw(optax.warmup_cosine_decay_schedule(0, 5e-3, 20, STEPS)), clip_norm=1.0)
opt_state = tx.init(params)


@jax.jit
def step(params, opt_state, x, y):
    def scaled_loss(params):
        loss = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), y).mean()
        return loss * loss_scale(opt_state), loss

    grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params, loss=loss)
    return optax.apply_updates(params, updates), opt_state, loss


losses, rng = [], np.random.default_rng(0)
for _ in range(STEPS):
    batch = rng.integers(len(pixels), size=64)
    params, opt_state, loss = step(params, opt_state, pixels[batch], labels[batch])
    losses.append(loss)

metrics = opt_state.scaler.metrics()
print(f"loss {losses[0]:.3f} -> {jnp.stack(losses[-20:]).mean():.3f}", end=", ")
print(f"skipped {metrics['skipped']} of {STEPS} steps, scale {metrics['scale']:g}")
